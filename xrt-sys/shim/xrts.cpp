// The C interface of xrts.h over XRT's C++ classes.
#include "xrts.h"

#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_hw_context.h>
#include <xrt/xrt_kernel.h>
#if __has_include(<xrt/experimental/xrt_ext.h>)
#include <xrt/experimental/xrt_elf.h>
#include <xrt/experimental/xrt_ext.h>
#include <xrt/experimental/xrt_kernel.h>
#include <xrt/experimental/xrt_system.h>
#include <xrt/experimental/xrt_version.h>
#include <xrt/experimental/xrt_xclbin.h>
#else
#include <experimental/xrt_elf.h>
#include <experimental/xrt_ext.h>
#include <experimental/xrt_kernel.h>
#include <experimental/xrt_system.h>
#include <experimental/xrt_version.h>
#include <experimental/xrt_xclbin.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

struct xrts_device { xrt::device xrt; };
struct xrts_elf { xrt::elf xrt; std::vector<xrt::elf::kernel> kernels; };
struct xrts_xclbin { xrt::xclbin xrt; std::vector<xrt::xclbin::kernel> kernels; };
struct xrts_context { xrt::hw_context xrt; };
struct xrts_kernel { xrt::kernel xrt; bool of_elf; };
struct xrts_bo { xrt::bo xrt; };
struct xrts_run { xrt::run xrt; };
struct xrts_runlist { xrt::runlist xrt; };

namespace {

struct failure {
  int code = 0;
  std::string text;
};

thread_local failure last;

int fail(int kind, int code, const char* text) noexcept
{
  last.code = code;
  try {
    last.text = text ? text : "";
  } catch (...) {
    last.text.clear();
  }
  return kind;
}

// Runs `work`; what it throws becomes a kind, the most derived type first.
// aie_error::data() is declared in XRT 2.25's headers but not exported by its library: it must not be named here.
template <typename Work>
int guarded(Work&& work) noexcept
{
  try {
    work();
    return XRTS_OK;
  } catch (const xrt::run::aie_error& e) {
    return fail(XRTS_AIE, static_cast<int>(e.get_command_state()), e.what());
  } catch (const xrt::run::command_error& e) {
    return fail(XRTS_COMMAND, static_cast<int>(e.get_command_state()), e.what());
  } catch (const xrt::runlist::command_error& e) {
    return fail(XRTS_RUNLIST, static_cast<int>(e.get_command_state()), e.what());
  } catch (const xrt::device::oom_error& e) {
    return fail(XRTS_MEMORY, 0, e.what());
  } catch (const std::bad_alloc& e) {
    return fail(XRTS_MEMORY, 0, e.what());
  } catch (const std::system_error& e) {
    return fail(XRTS_SYSTEM, e.code().value(), e.what());
  } catch (const std::exception& e) {
    return fail(XRTS_RUNTIME, 0, e.what());
  } catch (...) {
    return fail(XRTS_UNKNOWN, 0, "something was thrown that is no std::exception");
  }
}

template <typename... Pointers>
bool all(const Pointers*... pointers) noexcept
{
  return ((pointers != nullptr) && ...);
}

int null() noexcept { return fail(XRTS_ARGUMENT, 0, "a pointer is NULL"); }

// The common shape: no pointer may be NULL, then `work`.
template <typename Work, typename... Pointers>
int with(Work&& work, const Pointers*... pointers) noexcept
{
  return all(pointers...) ? guarded(std::forward<Work>(work)) : null();
}

void copy(const std::string& from, char* text, size_t capacity, size_t* length)
{
  if (length)
    *length = from.size();
  if (!text || !capacity)
    return;
  const auto n = std::min(from.size(), capacity - 1);
  std::memcpy(text, from.data(), n);
  text[n] = 0;
}

template <typename T>
void release(T* object) noexcept
{
  (void)guarded([&] { delete object; });
}

std::string info(const xrt::device& device, uint32_t key)
{
  using k = xrt::info::device;
  switch (static_cast<k>(key)) {
  case k::bdf: return device.get_info<k::bdf>();
  case k::name: return device.get_info<k::name>();
  case k::electrical: return device.get_info<k::electrical>();
  case k::thermal: return device.get_info<k::thermal>();
  case k::memory: return device.get_info<k::memory>();
  case k::platform: return device.get_info<k::platform>();
  case k::pcie_info: return device.get_info<k::pcie_info>();
  case k::host: return device.get_info<k::host>();
  case k::aie: return device.get_info<k::aie>();
  case k::aie_shim: return device.get_info<k::aie_shim>();
  case k::dynamic_regions: return device.get_info<k::dynamic_regions>();
  case k::aie_mem: return device.get_info<k::aie_mem>();
  default: throw std::invalid_argument("this key's answer is no text");
  }
}

xrts_elf* loaded(xrt::elf&& elf)
{
  auto kernels = elf.get_kernels();
  return new xrts_elf{std::move(elf), std::move(kernels)};
}

xclBOSyncDirection way(int direction)
{
  if (direction == 0)
    return XCL_BO_SYNC_BO_TO_DEVICE;
  if (direction == 1)
    return XCL_BO_SYNC_BO_FROM_DEVICE;
  throw std::invalid_argument("a direction is 0 or 1");
}

bool timed_out(std::cv_status status) { return status == std::cv_status::timeout; }

} // namespace

extern "C" {

int xrts_last_code(void) { return last.code; }
const char* xrts_last_text(void) { return last.text.c_str(); }

int xrts_version(uint32_t* code) { return with([&] { *code = xrt::version::code(); }, code); }

int xrts_device_count(uint32_t* count) { return with([&] { *count = xrt::system::enumerate_devices(); }, count); }
int xrts_device_open(uint32_t index, xrts_device** out)
{
  return with([&] { *out = new xrts_device{xrt::device(index)}; }, out);
}
int xrts_device_open_bdf(const char* bdf, xrts_device** out)
{
  return with([&] { *out = new xrts_device{xrt::device(std::string(bdf))}; }, bdf, out);
}
int xrts_device_info(const xrts_device* device, uint32_t key, char* text, size_t capacity, size_t* length)
{
  return with([&] { copy(info(device->xrt, key), text, capacity, length); }, device);
}
int xrts_device_register_xclbin(xrts_device* device, const xrts_xclbin* xclbin, uint8_t uuid[16])
{
  return with([&] { std::memcpy(uuid, device->xrt.register_xclbin(xclbin->xrt).get(), 16); }, device, xclbin, uuid);
}
void xrts_device_free(xrts_device* device) { release(device); }

int xrts_elf_open(const char* path, xrts_elf** out)
{
  return with([&] { *out = loaded(xrt::elf(std::string(path))); }, path, out);
}
int xrts_elf_from_bytes(const void* bytes, size_t length, xrts_elf** out)
{
  return with([&] { *out = loaded(xrt::elf(bytes, length)); }, bytes, out);
}
int xrts_elf_is_full(const xrts_elf* elf, int* full) { return with([&] { *full = elf->xrt.is_full_elf(); }, elf, full); }
int xrts_elf_platform(const xrts_elf* elf, uint32_t* platform)
{
  return with([&] { *platform = static_cast<uint32_t>(elf->xrt.get_platform()); }, elf, platform);
}
int xrts_elf_columns(const xrts_elf* elf, uint32_t* columns)
{
  return with([&] { *columns = elf->xrt.get_partition_size(); }, elf, columns);
}
int xrts_elf_kernel_count(const xrts_elf* elf, size_t* count)
{
  return with([&] { *count = elf->kernels.size(); }, elf, count);
}
int xrts_elf_kernel_name(const xrts_elf* elf, size_t kernel, char* text, size_t capacity, size_t* length)
{
  return with([&] { copy(elf->kernels.at(kernel).get_name(), text, capacity, length); }, elf);
}
int xrts_elf_kernel_args(const xrts_elf* elf, size_t kernel, size_t* count)
{
  return with([&] { *count = elf->kernels.at(kernel).get_num_args(); }, elf, count);
}
int xrts_elf_instance_count(const xrts_elf* elf, size_t kernel, size_t* count)
{
  return with([&] { *count = elf->kernels.at(kernel).get_instances().size(); }, elf, count);
}
int xrts_elf_instance_name(const xrts_elf* elf, size_t kernel, size_t instance, char* text, size_t capacity, size_t* length)
{
  return with([&] { copy(elf->kernels.at(kernel).get_instances().at(instance).get_name(), text, capacity, length); }, elf);
}
void xrts_elf_free(xrts_elf* elf) { release(elf); }

int xrts_xclbin_open(const char* path, xrts_xclbin** out)
{
  return with([&] {
    xrt::xclbin xclbin{std::string(path)};
    auto kernels = xclbin.get_kernels();
    *out = new xrts_xclbin{std::move(xclbin), std::move(kernels)};
  }, path, out);
}
int xrts_xclbin_uuid(const xrts_xclbin* xclbin, uint8_t uuid[16])
{
  return with([&] { std::memcpy(uuid, xclbin->xrt.get_uuid().get(), 16); }, xclbin, uuid);
}
int xrts_xclbin_kernel_count(const xrts_xclbin* xclbin, size_t* count)
{
  return with([&] { *count = xclbin->kernels.size(); }, xclbin, count);
}
int xrts_xclbin_kernel_name(const xrts_xclbin* xclbin, size_t kernel, char* text, size_t capacity, size_t* length)
{
  return with([&] { copy(xclbin->kernels.at(kernel).get_name(), text, capacity, length); }, xclbin);
}
int xrts_xclbin_kernel_args(const xrts_xclbin* xclbin, size_t kernel, size_t* count)
{
  return with([&] { *count = xclbin->kernels.at(kernel).get_num_args(); }, xclbin, count);
}
void xrts_xclbin_free(xrts_xclbin* xclbin) { release(xclbin); }

int xrts_context_from_elf(const xrts_device* device, const xrts_elf* elf, xrts_context** out)
{
  return with([&] { *out = new xrts_context{xrt::hw_context(device->xrt, elf->xrt)}; }, device, elf, out);
}
int xrts_context_from_xclbin(const xrts_device* device, const uint8_t uuid[16], xrts_context** out)
{
  return with([&] {
    xuid_t id;
    std::memcpy(id, uuid, 16);
    *out = new xrts_context{xrt::hw_context(device->xrt, xrt::uuid(id))};
  }, device, uuid, out);
}
int xrts_context_add(xrts_context* context, const xrts_elf* elf)
{
  return with([&] { context->xrt.add_config(elf->xrt); }, context, elf);
}
void xrts_context_free(xrts_context* context) { release(context); }

int xrts_kernel_from_elf(const xrts_context* context, const char* name, xrts_kernel** out)
{
  return with([&] { *out = new xrts_kernel{xrt::ext::kernel(context->xrt, std::string(name)), true}; }, context, name, out);
}
int xrts_kernel_from_xclbin(const xrts_context* context, const char* name, xrts_kernel** out)
{
  return with([&] { *out = new xrts_kernel{xrt::kernel(context->xrt, std::string(name)), false}; }, context, name, out);
}
int xrts_kernel_group_id(const xrts_kernel* kernel, int argument, int* group)
{
  if (kernel && kernel->of_elf)
    return fail(XRTS_ARGUMENT, 0, "a kernel of an ELF has no memory groups");
  return with([&] { *group = kernel->xrt.group_id(argument); }, kernel, group);
}
void xrts_kernel_free(xrts_kernel* kernel) { release(kernel); }

int xrts_bo_new(const xrts_device* device, size_t bytes, uint64_t access, xrts_bo** out)
{
  using mode = xrt::ext::bo::access_mode;
  return with([&] {
    *out = access ? new xrts_bo{xrt::ext::bo(device->xrt, bytes, static_cast<mode>(access))}
                  : new xrts_bo{xrt::ext::bo(device->xrt, bytes)};
  }, device, out);
}
int xrts_bo_with_flags(const xrts_device* device, size_t bytes, uint32_t flags, uint32_t group, xrts_bo** out)
{
  return with([&] { *out = new xrts_bo{xrt::bo(device->xrt, bytes, static_cast<xrt::bo::flags>(flags), group)}; }, device, out);
}
int xrts_bo_part(const xrts_bo* whole, size_t bytes, size_t offset, xrts_bo** out)
{
  return with([&] { *out = new xrts_bo{xrt::bo(whole->xrt, bytes, offset)}; }, whole, out);
}
int xrts_bo_size(const xrts_bo* bo, size_t* bytes) { return with([&] { *bytes = bo->xrt.size(); }, bo, bytes); }
int xrts_bo_address(const xrts_bo* bo, uint64_t* address) { return with([&] { *address = bo->xrt.address(); }, bo, address); }
int xrts_bo_map(xrts_bo* bo, void** out) { return with([&] { *out = bo->xrt.map(); }, bo, out); }
int xrts_bo_sync(xrts_bo* bo, int direction, size_t bytes, size_t offset)
{
  return with([&] { bo->xrt.sync(way(direction), bytes, offset); }, bo);
}
void xrts_bo_free(xrts_bo* bo) { release(bo); }

int xrts_run_new(const xrts_kernel* kernel, xrts_run** out)
{
  return with([&] { *out = new xrts_run{xrt::run(kernel->xrt)}; }, kernel, out);
}
int xrts_run_set_bo(xrts_run* run, int argument, const xrts_bo* bo)
{
  return with([&] { run->xrt.set_arg(argument, bo->xrt); }, run, bo);
}
int xrts_run_set_bytes(xrts_run* run, int argument, const void* value, size_t length)
{
  return with([&] { run->xrt.set_arg(argument, value, length); }, run, value);
}
int xrts_run_start(xrts_run* run) { return with([&] { run->xrt.start(); }, run); }
int xrts_run_state(const xrts_run* run, uint32_t* state)
{
  return with([&] { *state = static_cast<uint32_t>(run->xrt.state()); }, run, state);
}
int xrts_run_wait2(const xrts_run* run, uint32_t milliseconds, int* expired)
{
  return with([&] { *expired = timed_out(run->xrt.wait2(std::chrono::milliseconds(milliseconds))); }, run, expired);
}
void xrts_run_free(xrts_run* run) { release(run); }

int xrts_runlist_new(const xrts_context* context, xrts_runlist** out)
{
  return with([&] { *out = new xrts_runlist{xrt::runlist(context->xrt)}; }, context, out);
}
int xrts_runlist_add(xrts_runlist* list, const xrts_run* run) { return with([&] { list->xrt.add(run->xrt); }, list, run); }
int xrts_runlist_execute(xrts_runlist* list) { return with([&] { list->xrt.execute(); }, list); }
int xrts_runlist_state(const xrts_runlist* list, uint32_t* state)
{
  return with([&] { *state = static_cast<uint32_t>(list->xrt.state()); }, list, state);
}
int xrts_runlist_wait(const xrts_runlist* list, uint32_t milliseconds, int* expired)
{
  return with([&] { *expired = timed_out(list->xrt.wait(std::chrono::milliseconds(milliseconds))); }, list, expired);
}
int xrts_runlist_reset(xrts_runlist* list) { return with([&] { list->xrt.reset(); }, list); }
void xrts_runlist_free(xrts_runlist* list) { release(list); }

} // extern "C"
