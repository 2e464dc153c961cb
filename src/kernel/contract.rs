//! What one compiled dispatch is: its launches over its arguments, with every size. Two dispatches of one contract can
//! run the same ELF; a contract's hash is its name in a sealed kernel cache.
//!
//! Made from bound launches alone; knows no buffer, device or model.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{ArgRole, Dtype, Kernel};
use crate::error::{Error, Result};

/// Changes when the form of a contract does, so that an old seal is not taken for a new one.
const SCHEMA: &str = "phasegate/contract/1";

/// How an argument lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArgumentLayout {
    /// Row-major `rows x cols`. An HF linear weight `[out, in]` lies so for a GEMV.
    Rows,
    /// An HF linear weight `[out, in]`, transposed to `[in, out]`, as a GEMM wants it. `rows` and `cols` are HF's.
    Transposed,
}

/// Who writes an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArgumentRole {
    /// The host, or an earlier dispatch.
    Input,
    /// The host, once.
    Weight,
    /// This dispatch.
    Output,
    /// Read as an earlier one left it, and written.
    InOut,
}

/// One argument of a dispatch.
///
/// Shapes: `rows x cols`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Argument {
    pub name: String,
    pub role: ArgumentRole,
    pub dtype: Dtype,
    pub rows: usize,
    pub cols: usize,
    pub layout: ArgumentLayout,
}

impl Argument {
    /// Units: bytes.
    pub fn bytes(&self) -> usize {
        self.rows * self.cols * self.dtype.bytes()
    }
}

/// One launch over the dispatch's arguments, by their places.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContractLaunch {
    pub kernel: Kernel,
    pub args: Vec<usize>,
}

/// Everything an ELF must agree with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contract {
    pub launches: Vec<ContractLaunch>,
    pub args: Vec<Argument>,
}

impl Contract {
    /// The contract of launches bound to buffers of any kind, and the buffers in the order of its arguments. A buffer
    /// that several launches use is one argument; where two name it differently, the first name counts.
    ///
    /// Errors: [`Error::Plan`] when a launch has the wrong number of arguments, or two launches see a buffer in two
    /// sizes, types or layouts.
    pub fn of<B: Copy + Ord>(launches: &[(Kernel, Vec<B>)]) -> Result<(Contract, Vec<B>)> {
        let mut contract = Contract { launches: vec![], args: vec![] };
        let mut places: BTreeMap<B, usize> = BTreeMap::new();
        let mut buffers = vec![];
        for (number, (kernel, bound)) in launches.iter().enumerate() {
            let declared = kernel.args();
            if declared.len() != bound.len() {
                let (found, expected) = (bound.len(), declared.len());
                return Err(Error::Plan { why: format!("{kernel}: found {found} arguments, expected {expected}") });
            }
            let prefix = if launches.len() > 1 { format!("{number}.") } else { String::new() };
            let mut args = vec![];
            for (arg, &buffer) in declared.into_iter().zip(bound) {
                let seen = Argument {
                    name: format!("{prefix}{}", arg.name),
                    role: role(arg.role),
                    dtype: arg.dtype,
                    rows: arg.rows,
                    cols: arg.cols,
                    layout: layout(kernel, arg.role),
                };
                let place = *places.entry(buffer).or_insert_with(|| {
                    buffers.push(buffer);
                    contract.args.push(seen.clone());
                    contract.args.len() - 1
                });
                contract.args[place].merge(&seen, kernel)?;
                args.push(place);
            }
            contract.launches.push(ContractLaunch { kernel: kernel.clone(), args });
        }
        if contract.launches.is_empty() {
            return Err(Error::Plan { why: "a dispatch without a launch".into() });
        }
        Ok((contract, buffers))
    }

    /// The dispatch's id, which is also its kernel's name in an ELF: `[a-z0-9_]`.
    pub fn id(&self) -> String {
        let ids: Vec<&str> = self.launches.iter().map(|launch| launch.kernel.id()).collect();
        match ids.as_slice() {
            [id] => (*id).to_owned(),
            ids => format!("merged_{}", ids.join("_")),
        }
    }

    /// Id and shape for people: `gemv::m00576_k0576`; of a merged dispatch all of them.
    pub fn describe(&self) -> String {
        self.launches.iter().map(|launch| launch.kernel.to_string()).collect::<Vec<_>>().join(" + ")
    }

    /// sha256 of the whole contract, in hex.
    pub fn hash(&self) -> String {
        let text = serde_json::to_vec(&(SCHEMA, self)).expect("a contract holds nothing that JSON cannot");
        hex(&Sha256::digest(text))
    }

    /// The stem of its files in a kernel cache.
    pub fn stem(&self) -> String {
        let first = self.launches[0].kernel.to_string();
        let shape = first.split_once("::").map_or("", |(_, shape)| shape);
        let mut id = self.id();
        id.truncate(80);
        format!("{id}.{shape}-{}", &self.hash()[..12])
    }
}

impl Argument {
    /// Another launch's view of the same buffer.
    fn merge(&mut self, seen: &Argument, kernel: &Kernel) -> Result<()> {
        if (self.dtype, self.bytes(), self.layout) != (seen.dtype, seen.bytes(), seen.layout) {
            return Err(Error::Plan { why: format!("{kernel}: {} is another argument's buffer: {self:?}", seen.name) });
        }
        use ArgumentRole::{InOut, Input, Output};
        if (self.role, seen.role) == (Input, Output) {
            self.role = InOut;
        }
        Ok(())
    }
}

fn role(role: ArgRole) -> ArgumentRole {
    match role {
        ArgRole::Input => ArgumentRole::Input,
        ArgRole::LinearWeight => ArgumentRole::Weight,
        ArgRole::Output => ArgumentRole::Output,
    }
}

fn layout(kernel: &Kernel, role: ArgRole) -> ArgumentLayout {
    match (kernel, role) {
        (Kernel::Gemm { .. } | Kernel::GemmLow { .. }, ArgRole::LinearWeight) => ArgumentLayout::Transposed,
        _ => ArgumentLayout::Rows,
    }
}

/// Bytes in hex.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Epsilon;

    fn add(rows: usize) -> Kernel {
        Kernel::Add { rows, cols: 64 }
    }

    #[test]
    fn a_contract_survives_json_and_keeps_its_hash() {
        let norm = Kernel::RmsNorm { rows: 2, cols: 64, eps: Epsilon::new(1e-5) };
        let gemm = Kernel::Gemm { m: 2, k: 64, n: 96, out: Dtype::F32 };
        let (contract, buffers) = Contract::of(&[(norm, vec!['x', 'w', 'n']), (gemm, vec!['n', 'g', 'y'])]).unwrap();
        assert_eq!(buffers, ['x', 'w', 'n', 'g', 'y']);
        assert_eq!(contract.id(), "merged_rms_norm_gemm_f32");
        let back: Contract = serde_json::from_str(&serde_json::to_string(&contract).unwrap()).unwrap();
        assert_eq!((back.hash(), &back), (contract.hash(), &contract));
        assert_eq!(contract.args[3].layout, ArgumentLayout::Transposed);
        assert_eq!(contract.args[2].role, ArgumentRole::Output);
    }

    #[test]
    fn what_an_elf_depends_on_changes_the_hash() {
        let eps = |eps| Kernel::RmsNorm { rows: 2, cols: 64, eps: Epsilon::new(eps) };
        let hash = |kernel: Kernel, args: [u8; 3]| Contract::of(&[(kernel, args.to_vec())]).unwrap().0.hash();
        let hashes = [
            hash(add(2), [0, 1, 2]),
            hash(add(3), [0, 1, 2]),
            hash(add(2), [0, 1, 0]),
            hash(eps(1e-5), [0, 1, 2]),
            hash(eps(1e-6), [0, 1, 2]),
        ];
        assert_eq!(std::collections::BTreeSet::from(hashes.clone()).len(), hashes.len());
        assert_eq!(hash(add(2), [0, 1, 2]), hash(add(2), [7, 3, 5]));
    }

    #[test]
    fn in_place_is_one_argument_read_and_written() {
        let (contract, _) = Contract::of(&[(add(2), vec![0, 1, 0])]).unwrap();
        assert_eq!(
            contract.args.iter().map(|a| a.role).collect::<Vec<_>>(),
            [ArgumentRole::InOut, ArgumentRole::Input]
        );
        assert_eq!(contract.launches[0].args, [0, 1, 0]);
    }

    #[test]
    fn one_buffer_in_two_sizes_is_refused() {
        let rope = Kernel::Rope { rows: 4, head_dim: 32 };
        assert!(Contract::of(&[(add(2), vec![0, 1, 2]), (rope, vec![2, 3, 4])]).is_ok());
        let bias = Kernel::BiasAdd { rows: 2, cols: 64 };
        assert!(Contract::of(&[(bias, vec![0, 0, 1])]).is_err());
        assert!(Contract::of(&[(add(2), vec![0, 1])]).is_err());
        assert!(Contract::of::<u8>(&[]).is_err());
    }
}
