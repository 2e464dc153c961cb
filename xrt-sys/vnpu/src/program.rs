//! What an ELF of the virtual NPU holds, written by `vnpu-elves` and read by the device: a PDI that is the dispatch's
//! contract in JSON, and control code that loads it and gives each argument's address and length to a buffer descriptor.
//!
//! On silicon the PDI configures the array and the control code drives it; here the one says what to compute and the
//! other, patched by XRT as it would be for silicon, on which buffers. Pure: bytes to values and back.

/// In front of the contract, so that a PDI of another maker is not taken for one of ours.
const MAGIC: &[u8; 8] = b"PGVNPU01";

/// Operations of a transaction, by the lowest byte of their first word.
mod operation {
    pub const WRITE: u32 = 0;
    pub const BLOCK_WRITE: u32 = 1;
    pub const MASK_WRITE: u32 = 3;
    pub const MASK_POLL: u32 = 4;
    pub const NOTHING: u32 = 5;
    pub const PREEMPT: u32 = 6;
    pub const MASK_POLL_BUSY: u32 = 7;
    pub const LOAD_PDI: u32 = 8;
    /// From here on operations say their own length.
    pub const CUSTOM: u32 = 128;
    pub const PATCH: u32 = 129;
}

/// Units: bytes. Of a transaction's header.
const HEADER: usize = 16;

/// Words of a buffer descriptor: length, address, rest.
const DESCRIPTOR: usize = 8;

/// What XRT adds to an address that it patches into a descriptor: where the array sees the host's memory.
const HOST_MEMORY: u64 = 0x8000_0000;

/// Descriptors of one column's shim tile.
const PER_COLUMN: usize = 16;

/// A PDI that names its computation.
pub fn pdi(contract: &str) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend((contract.len() as u32).to_le_bytes());
    bytes.extend(contract.as_bytes());
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes
}

/// How long the contract in a PDI is, from its first 12 bytes; none for another maker's.
pub fn contract_length(pdi: [u8; 12]) -> Option<usize> {
    let (magic, length) = pdi.split_at(8);
    (magic == MAGIC).then(|| u32::from_le_bytes(length.try_into().expect("four bytes")) as usize)
}

/// Control code for arguments of these sizes. Units: bytes.
pub fn control_code(arguments: &[usize], pdi_id: u32) -> Vec<u8> {
    let mut body: Vec<u32> = vec![operation::LOAD_PDI | pdi_id << 16, 0, 0, 0];
    for (index, &bytes) in arguments.iter().enumerate() {
        let (column, descriptor) = (index / PER_COLUMN, index % PER_COLUMN);
        let register = ((column as u32) << 25) | (0x1d000 + 0x20 * descriptor as u32);
        let size = 4 * (4 + DESCRIPTOR) as u32;
        body.extend([operation::BLOCK_WRITE, 0, register, size]);
        body.extend([bytes.div_ceil(4) as u32, 0, 0, 0, 0x8000_0000, 0x0200_0000, 0, 0x0200_0000]);
        body.extend([operation::PATCH, 48, 0, 0, 0, 0, register + 4, 0, index as u32, 0, 0, 0]);
    }
    let columns = arguments.len().div_ceil(PER_COLUMN).max(1) as u8;
    // Version 0.1 for an AIE2P of 6 rows, one of them memory tiles.
    let mut code = vec![0, 1, 4, 6, columns, 1, 0, 0];
    code.extend((1 + 2 * arguments.len() as u32).to_le_bytes());
    code.extend((HEADER as u32 + 4 * body.len() as u32).to_le_bytes());
    code.extend(body.into_iter().flat_map(u32::to_le_bytes));
    code
}

/// One argument as the control code hands it to a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    pub index: u32,
    pub address: u64,
    pub bytes: u64,
}

/// What patched control code says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decoded {
    /// Address of the PDI.
    pub pdi: Option<u64>,
    pub arguments: Vec<Argument>,
}

/// Reads patched control code.
///
/// Errors: what is wrong with it; nothing is guessed past an operation of unknown length.
pub fn decode(code: &[u8]) -> Result<Decoded, String> {
    let word = |at: usize| -> Result<u32, String> {
        let bytes = code.get(at..at + 4).ok_or_else(|| format!("control code ends within word {}", at / 4))?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    };
    if word(0)? & 0xff != 0 {
        return Err(format!("control code of version {}, expected 0", word(0)? & 0xff));
    }
    let (mut at, mut decoded) = (HEADER, Decoded::default());
    // Register to the place of the descriptor that was written there last.
    let mut descriptors: Vec<(u32, usize)> = vec![];
    for _ in 0..word(8)? {
        let operation = word(at)? & 0xff;
        let length = match operation {
            operation::WRITE => word(at + 20)?.max(24),
            operation::BLOCK_WRITE => {
                let (register, length) = (word(at + 8)?, word(at + 12)?);
                let descriptor = 4 * DESCRIPTOR as u32;
                for k in 0..length.saturating_sub(16) / descriptor {
                    descriptors.push((register + k * descriptor, at + 16 + (k * descriptor) as usize));
                }
                length
            }
            operation::MASK_WRITE | operation::MASK_POLL | operation::MASK_POLL_BUSY => word(at + 24)?.max(28),
            operation::NOTHING | operation::PREEMPT => 4,
            operation::LOAD_PDI => {
                decoded.pdi = Some(u64::from(word(at + 8)?) | u64::from(word(at + 12)?) << 32);
                16
            }
            operation::PATCH => {
                let (register, index) = (word(at + 24)? & !0xf, word(at + 32)?);
                let plus = u64::from(word(at + 40)?) | u64::from(word(at + 44)?) << 32;
                if plus != 0 {
                    return Err(format!("argument {index}: offset {plus} is not known here"));
                }
                let place = descriptors.iter().rev().find(|(there, _)| *there == register);
                let place = place.ok_or_else(|| format!("argument {index}: no descriptor at {register:#x}"))?.1;
                let high = u64::from(word(place + 8)? & 0xffff);
                let address = (high << 32 | u64::from(word(place + 4)?)).wrapping_sub(HOST_MEMORY);
                let bytes = 4 * u64::from(word(place)?);
                decoded.arguments.push(Argument { index, address, bytes });
                word(at + 4)?
            }
            operation if operation >= operation::CUSTOM => word(at + 4)?,
            operation => return Err(format!("operation {operation} at byte {at} is not known")),
        };
        if length < 4 {
            return Err(format!("operation {operation} at byte {at} has length {length}"));
        }
        at += length as usize;
    }
    decoded.arguments.sort_by_key(|argument| argument.index);
    Ok(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As XRT patches: word 1 of each descriptor and the low half of word 2.
    fn patched(mut code: Vec<u8>, pdi: u64, addresses: &[u64]) -> Vec<u8> {
        code[24..32].copy_from_slice(&pdi.to_le_bytes());
        for (index, address) in addresses.iter().enumerate() {
            let at = HEADER + 16 + index * (48 + 48) + 16 + 4;
            let seen = (address + HOST_MEMORY).to_le_bytes();
            code[at..at + 6].copy_from_slice(&seen[..6]);
        }
        code
    }

    #[test]
    fn what_is_written_is_read() {
        let addresses: Vec<u64> = (0..20).map(|i| 0x7f00_1234_0000 + (i << 16)).collect();
        let sizes: Vec<usize> = (0..20).map(|i| 6 + 4096 * i).collect();
        let decoded = decode(&patched(control_code(&sizes, 1), 0x400_0000, &addresses)).unwrap();
        assert_eq!(decoded.pdi, Some(0x400_0000));
        assert_eq!(decoded.arguments.len(), 20);
        for (argument, (address, bytes)) in decoded.arguments.iter().zip(addresses.iter().zip(&sizes)) {
            assert_eq!((argument.address, argument.bytes), (*address, 4 * bytes.div_ceil(4) as u64));
        }
    }

    #[test]
    fn damaged_code_is_an_error_and_no_guess() {
        let code = control_code(&[64, 64], 1);
        for cut in 0..code.len() {
            assert!(decode(&code[..cut]).is_err(), "cut at {cut}");
        }
        let mut unknown = code.clone();
        unknown[HEADER] = 99;
        assert!(decode(&unknown).unwrap_err().contains("operation 99"));
        let mut endless = code.clone();
        endless[HEADER + 16 + 12..HEADER + 16 + 16].fill(0);
        assert!(decode(&endless).is_err());
    }

    #[test]
    fn a_foreign_pdi_is_not_ours() {
        let pdi = pdi("{}");
        assert_eq!(pdi.len(), 4096);
        assert_eq!(contract_length(pdi[..12].try_into().unwrap()), Some(2));
        assert_eq!(contract_length([0xdd; 12]), None);
    }
}
