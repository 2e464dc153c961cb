//! A GGUF made by hand, whole and damaged.

use std::path::Path;

use half::f16;
use proptest::prelude::*;

use super::*;

fn string(s: &str) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat()
}

/// One F32, one Q8_0 and one Q4_1 tensor of 32 elements each.
fn made() -> Vec<u8> {
    let mut b = b"GGUF".to_vec();
    b.extend(3u32.to_le_bytes());
    b.extend(3u64.to_le_bytes());
    b.extend(2u64.to_le_bytes());
    b.extend([string("llama.block_count"), 4u32.to_le_bytes().to_vec(), 7u32.to_le_bytes().to_vec()].concat());
    b.extend(
        [string("tokens"), 9u32.to_le_bytes().to_vec(), 8u32.to_le_bytes().to_vec(), 2u64.to_le_bytes().to_vec()]
            .concat(),
    );
    b.extend([string("a"), string("b")].concat());
    let mut offset = 0u64;
    for (name, kind, bytes) in [("f", 0u32, 128u64), ("q8", 8, 34), ("q4", 3, 20)] {
        b.extend(string(name));
        b.extend(2u32.to_le_bytes());
        b.extend([32u64.to_le_bytes(), 1u64.to_le_bytes()].concat());
        b.extend(kind.to_le_bytes());
        b.extend(offset.to_le_bytes());
        offset += bytes.next_multiple_of(32);
    }
    b.resize(b.len().next_multiple_of(32), 0);
    b.extend((0..32).flat_map(|i| (i as f32).to_le_bytes()));
    b.extend(f16::from_f32(0.5).to_le_bytes());
    b.extend((0..32).map(|i| (i - 16) as i8 as u8));
    b.resize(b.len().next_multiple_of(32), 0);
    b.extend([f16::from_f32(2.0).to_le_bytes(), f16::from_f32(-1.0).to_le_bytes()].concat());
    b.extend((0..16).map(|i| i | ((15 - i) << 4)));
    b
}

#[test]
fn reads_values_and_blocks() {
    let bytes = made();
    let gguf = Gguf::parse(Path::new("x.gguf"), &bytes).expect("sound");
    assert_eq!(gguf.uint("llama.block_count").expect("there"), 7);
    assert_eq!(gguf.strings("tokens").expect("there"), ["a", "b"]);
    assert_eq!(gguf.tensors["f"].shape, [1, 32]);
    assert_eq!(gguf.f32("f").expect("there")[31], 31.0);
    let q8 = gguf.f32("q8").expect("there");
    assert_eq!((q8[0], q8[31]), (-8.0, 7.5));
    let q4 = gguf.f32("q4").expect("there");
    assert_eq!((q4[0], q4[15], q4[16], q4[31]), (-1.0, 29.0, 29.0, -1.0));
    assert!(gguf.string("tokens").expect_err("a list").to_string().contains("tokens: found"));
    assert!(gguf.f32("none").is_err());
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = made();
    for n in 0..bytes.len() {
        assert!(Gguf::parse(Path::new("x.gguf"), &bytes[..n]).is_err(), "{n} bytes");
    }
}

#[test]
fn says_what_is_wrong() {
    let error = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = made();
        change(&mut bytes);
        Gguf::parse(Path::new("x.gguf"), &bytes).expect_err("damaged").to_string()
    };
    assert!(error(&|b| b[0] = b'X').contains("no GGUF magic"));
    assert!(error(&|b| b[4] = 1).contains("version 1, expected 2 or 3"));
    assert!(error(&|b| b[24..32].fill(0xff)).contains("expected 18446744073709551615 more"));
}

proptest! {
    #[test]
    fn any_byte_changed(at in any::<prop::sample::Index>(), value in any::<u8>()) {
        let mut bytes = made();
        let at = at.index(bytes.len());
        bytes[at] = value;
        if let Ok(gguf) = Gguf::parse(Path::new("x"), &bytes) {
            for name in gguf.tensors.keys() {
                let _ = gguf.f32(name);
            }
        }
    }
}
