//! What is written comes back, whatever the pieces it came in, and nothing else is there.

use proptest::prelude::*;

use super::*;
use crate::compute::testing::{THREADS, bits, noise};

/// Every value that the memory holds, the unwritten ones included, in a fixed order.
fn halves(cache: &PackedCache) -> Vec<bf16> {
    // SAFETY: the region holds the layout's blocks, all of which is initialised.
    let words = unsafe { std::slice::from_raw_parts(cache.start(), cache.layout.len()) };
    words.iter().flat_map(|&pair| [half_of(pair, 0), half_of(pair, 1)]).collect()
}

fn write(cache: &mut PackedCache, pool: &Pool, position: usize, keys: &[bf16], values: &[bf16]) {
    cache.write_keys(pool, position, keys);
    cache.write_values(pool, position, values);
}

fn rows(cache: &PackedCache) -> (Vec<bf16>, Vec<bf16>) {
    let (mut keys, mut values) = (vec![], vec![]);
    (0..cache.len()).for_each(|position| cache.read(position, &mut keys, &mut values));
    (keys, values)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn rows_come_back_bit_for_bit_whatever_pieces_they_came_in(
        kv_heads in 1usize..4,
        half in 1usize..40,
        pieces in prop::collection::vec(prop_oneof![Just(1usize), 1usize..20, 1usize..200], 1..8),
        spare in 0usize..200,
        threads in prop::sample::select(THREADS.to_vec()),
    ) {
        let (len, pool) = (pieces.iter().sum::<usize>(), Pool::new(threads));
        let mut cache = PackedCache::new(kv_heads, 2 * half, len + spare);
        let width = cache.width();
        let (keys, values) = (noise(len * width, 1), noise(len * width, 2));
        let mut position = 0;
        for rows in pieces {
            let range = position * width..(position + rows) * width;
            write(&mut cache, &pool, position, &keys[range.clone()], &values[range]);
            position += rows;
        }
        prop_assert_eq!(cache.len(), len);
        let (found_keys, found_values) = rows(&cache);
        prop_assert_eq!(bits(&found_keys), bits(&keys));
        prop_assert_eq!(bits(&found_values), bits(&values));
        // All else is NaN, but for columns that pad a head and the values beside an odd last one.
        let sound = halves(&cache).iter().filter(|x| !x.is_nan()).count();
        let columns = kv_heads * half.div_ceil(PANEL / 2) * PANEL;
        prop_assert_eq!(sound, len * width + len.next_multiple_of(2) * columns);
    }

    /// A prompt after another one, which may have stepped back or failed before it wrote anything, leaves what a first one does.
    #[test]
    fn a_cache_that_starts_again_shows_nothing_of_the_earlier_prompt(
        before in 0usize..300,
        back in prop::option::of((0usize..300, 0usize..4)),
        failed in prop::option::of(0usize..300),
        after in 0usize..300,
    ) {
        let (pool, width) = (Pool::new(1), 6);
        let values = noise(300 * width, 3);
        let (mut used, mut fresh) = (PackedCache::new(1, width, 300), PackedCache::new(1, width, 300));
        write(&mut used, &pool, 0, &values[..before * width], &values[..before * width]);
        if let Some((position, rows)) = back.filter(|(position, rows)| position + rows <= before) {
            write(&mut used, &pool, position, &values[..rows * width], &values[..rows * width]);
            prop_assert_eq!(used.len(), position + rows);
        }
        failed.into_iter().for_each(|rows| used.restart(rows));
        used.restart(after);
        prop_assert!(used.is_empty());
        let prompt = &values[(300 - after) * width..];
        for cache in [&mut used, &mut fresh] {
            write(cache, &pool, 0, prompt, prompt);
        }
        let (used, fresh) = (halves(&used), halves(&fresh));
        prop_assert_eq!(bits(&used), bits(&fresh));
    }
}

#[test]
fn keys_without_values_are_no_position() {
    let (pool, mut cache) = (Pool::new(1), PackedCache::new(1, 2, 4));
    cache.write_keys(&pool, 0, &[bf16::ONE; 4]);
    assert!(cache.is_empty());
    cache.write_values(&pool, 0, &[bf16::ONE; 4]);
    assert_eq!(cache.len(), 2);
    // Nor are those that new keys have taken the place of.
    cache.write_keys(&pool, 1, &[bf16::ONE; 2]);
    assert_eq!(cache.len(), 1);
}

#[rstest::rstest]
#[case::without_keys(2, 2)]
#[case::fewer(1, 2)]
#[case::more(1, 6)]
#[should_panic = "cache: values "]
fn values_of_other_positions_than_the_keys_are_refused(#[case] position: usize, #[case] elements: usize) {
    let (pool, mut cache) = (Pool::new(1), PackedCache::new(1, 2, 8));
    write(&mut cache, &pool, 0, &[bf16::ONE; 2], &[bf16::ONE; 2]);
    cache.write_keys(&pool, 1, &[bf16::ONE; 4]);
    cache.write_values(&pool, position, &vec![bf16::ONE; elements]);
}

#[rstest::rstest]
#[case::gap(1, 2)]
#[case::overflow(0, 10)]
#[case::half_a_row(0, 1)]
#[should_panic = "cache: "]
fn what_does_not_fit_is_refused(#[case] position: usize, #[case] elements: usize) {
    PackedCache::new(1, 2, 4).write_keys(&Pool::new(1), position, &vec![bf16::ONE; elements]);
}
