use super::rope::*;
#[test]
fn tmp_inv() {
    let (mut bad, mut all) = (0, 0);
    for line in std::fs::read_to_string("/tmp/inv.txt").unwrap().lines() {
        let w: Vec<&str> = line.split(' ').collect();
        let (theta, dim): (f64, usize) = (w[0].parse().unwrap(), w[1].parse().unwrap());
        let t = RopeTable::from_parts(RopeParameters { rope_theta: theta, kind: RopeKind::Default }, dim, 2048).inv_freq(1);
        for (a, b) in t.iter().zip(&w[2..]) {
            all += 1;
            if a.to_bits() != u32::from_str_radix(b, 16).unwrap() { bad += 1; if bad < 20 { println!("{theta} {dim} {:08x} {b}", a.to_bits()); } }
        }
    }
    println!("bad {bad} of {all}");
    assert_eq!(bad, 0);
}
