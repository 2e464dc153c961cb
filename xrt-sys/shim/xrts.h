/* A C interface to XRT's C++ interface.
 *
 * Every function that can fail returns a kind (XRTS_OK or what went wrong) and never lets an exception out; the code
 * and the text of a thread's last failure are read with xrts_last_*. Objects are owned by the caller and freed with
 * their own *_free, in any order; NULL may be freed. */
#ifndef XRTS_H
#define XRTS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum xrts_kind {
  XRTS_OK = 0,
  XRTS_ARGUMENT = 1, /* a NULL or a number out of range, seen by the shim          */
  XRTS_SYSTEM = 2,   /* std::system_error; the code is an errno                    */
  XRTS_RUNTIME = 3,  /* any other std::exception                                   */
  XRTS_COMMAND = 4,  /* a run ended in another state than completed; the code is it */
  XRTS_AIE = 5,      /* the same, with a report of the array                       */
  XRTS_RUNLIST = 6,  /* a run of a list did                                        */
  XRTS_MEMORY = 7,   /* std::bad_alloc, or no memory on the device                 */
  XRTS_UNKNOWN = 8,  /* something thrown that is no std::exception                 */
  XRTS_NOT_BUILT = 9 /* the stub's answer                                          */
};

typedef struct xrts_device xrts_device;
typedef struct xrts_elf xrts_elf;
typedef struct xrts_xclbin xrts_xclbin;
typedef struct xrts_context xrts_context;
typedef struct xrts_kernel xrts_kernel;
typedef struct xrts_bo xrts_bo;
typedef struct xrts_run xrts_run;
typedef struct xrts_runlist xrts_runlist;

/* Of this thread's last call. The text is valid until its next one. */
int xrts_last_code(void);
const char *xrts_last_text(void);

/* major << 16 | minor, of the library in this process. */
int xrts_version(uint32_t *code);

/* Devices. Info keys are xrt::info::device's; only those with a text for an answer. Texts are cut to `capacity - 1`
 * bytes and closed with a NUL; `length` is that of the whole. */
int xrts_device_count(uint32_t *count);
int xrts_device_open(uint32_t index, xrts_device **out);
int xrts_device_open_bdf(const char *bdf, xrts_device **out);
int xrts_device_info(const xrts_device *device, uint32_t key, char *text, size_t capacity, size_t *length);
int xrts_device_register_xclbin(xrts_device *device, const xrts_xclbin *xclbin, uint8_t uuid[16]);
void xrts_device_free(xrts_device *device);

/* ELFs. `platform` is the OS/ABI of the ELF's header. */
int xrts_elf_open(const char *path, xrts_elf **out);
int xrts_elf_from_bytes(const void *bytes, size_t length, xrts_elf **out);
int xrts_elf_is_full(const xrts_elf *elf, int *full);
int xrts_elf_platform(const xrts_elf *elf, uint32_t *platform);
int xrts_elf_columns(const xrts_elf *elf, uint32_t *columns);
int xrts_elf_kernel_count(const xrts_elf *elf, size_t *count);
int xrts_elf_kernel_name(const xrts_elf *elf, size_t kernel, char *text, size_t capacity, size_t *length);
int xrts_elf_kernel_args(const xrts_elf *elf, size_t kernel, size_t *count);
int xrts_elf_instance_count(const xrts_elf *elf, size_t kernel, size_t *count);
int xrts_elf_instance_name(const xrts_elf *elf, size_t kernel, size_t instance, char *text, size_t capacity, size_t *length);
void xrts_elf_free(xrts_elf *elf);

int xrts_xclbin_open(const char *path, xrts_xclbin **out);
int xrts_xclbin_uuid(const xrts_xclbin *xclbin, uint8_t uuid[16]);
int xrts_xclbin_kernel_count(const xrts_xclbin *xclbin, size_t *count);
int xrts_xclbin_kernel_name(const xrts_xclbin *xclbin, size_t kernel, char *text, size_t capacity, size_t *length);
int xrts_xclbin_kernel_args(const xrts_xclbin *xclbin, size_t kernel, size_t *count);
void xrts_xclbin_free(xrts_xclbin *xclbin);

int xrts_context_from_elf(const xrts_device *device, const xrts_elf *elf, xrts_context **out);
int xrts_context_from_xclbin(const xrts_device *device, const uint8_t uuid[16], xrts_context **out);
int xrts_context_add(xrts_context *context, const xrts_elf *elf);
void xrts_context_free(xrts_context *context);

/* group_id crashes on a kernel of an ELF: such a kernel answers XRTS_ARGUMENT. */
int xrts_kernel_from_elf(const xrts_context *context, const char *name, xrts_kernel **out);
int xrts_kernel_from_xclbin(const xrts_context *context, const char *name, xrts_kernel **out);
int xrts_kernel_group_id(const xrts_kernel *kernel, int argument, int *group);
void xrts_kernel_free(xrts_kernel *kernel);

/* Buffers: xrt::ext::bo (access 0: XRT's default), or with the flags and group of xrt::bo. `direction` 0 is to the
 * device, 1 from it. */
int xrts_bo_new(const xrts_device *device, size_t bytes, uint64_t access, xrts_bo **out);
int xrts_bo_with_flags(const xrts_device *device, size_t bytes, uint32_t flags, uint32_t group, xrts_bo **out);
int xrts_bo_part(const xrts_bo *whole, size_t bytes, size_t offset, xrts_bo **out);
int xrts_bo_size(const xrts_bo *bo, size_t *bytes);
int xrts_bo_address(const xrts_bo *bo, uint64_t *address);
int xrts_bo_map(xrts_bo *bo, void **out);
int xrts_bo_sync(xrts_bo *bo, int direction, size_t bytes, size_t offset);
void xrts_bo_free(xrts_bo *bo);

/* Runs. Freeing one in flight aborts the process; waiting for one that was never started does not return. wait2 with
 * `milliseconds` 0 waits for ever, and when the time is over it may fail or set `expired`: ask for the state first. */
int xrts_run_new(const xrts_kernel *kernel, xrts_run **out);
int xrts_run_set_bo(xrts_run *run, int argument, const xrts_bo *bo);
int xrts_run_set_bytes(xrts_run *run, int argument, const void *value, size_t length);
int xrts_run_start(xrts_run *run);
int xrts_run_state(const xrts_run *run, uint32_t *state);
int xrts_run_wait2(const xrts_run *run, uint32_t milliseconds, int *expired);
void xrts_run_free(xrts_run *run);

int xrts_runlist_new(const xrts_context *context, xrts_runlist **out);
int xrts_runlist_add(xrts_runlist *list, const xrts_run *run);
int xrts_runlist_execute(xrts_runlist *list);
int xrts_runlist_state(const xrts_runlist *list, uint32_t *state);
int xrts_runlist_wait(const xrts_runlist *list, uint32_t milliseconds, int *expired);
int xrts_runlist_reset(xrts_runlist *list);
void xrts_runlist_free(xrts_runlist *list);

#ifdef __cplusplus
}
#endif
#endif
