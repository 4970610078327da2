//! Switches that only the real widths and long contexts have.

mod slice;

use lily_gpu::{Profile, Tuning};
use lily_softgpu::Options;

/// From 32K tokens on splits are whole pages; without the switch they are as below.
#[test]
fn fixed_blocks_are_near_the_general_path() {
    let logits = |tuning| slice::step(&mut *slice::program(Options::default(), tuning, 32_800));
    let on = logits(Tuning::default());
    let off = logits(Tuning::without("fixed_block").expect("a switch"));
    let largest = on.iter().fold(0f32, |m, x| m.max(x.abs()));
    let error = on.iter().zip(&off).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    println!("by {error} of {largest}");
    assert!(on.iter().all(|x| x.is_finite()) && largest > 0.1, "{largest}");
    // Sums in another order, rounded to bf16 on the way.
    assert!(error <= 0.01 * largest, "{error} of {largest}");
    assert!(on != off, "the paths sum in different orders");
    // Below the threshold nothing changes.
    let logits = |tuning| slice::step(&mut *slice::program(Options::default(), tuning, 500));
    let [on, off] =
        [Tuning::default(), Tuning::without("fixed_block").expect("a switch")].map(logits);
    assert!(on == off, "below the threshold");
}

/// On a device with `mma.sync` the fixed blocks are matrix products, with probabilities rounded to bf16.
#[test]
fn fixed_blocks_by_matrix_units_are_near() {
    let profile = Profile { mma: true, ..Profile::named("softgpu").expect("a known profile") };
    let options = || Options { profile: profile.clone(), ..Options::default() };
    let logits = |tuning| slice::step(&mut *slice::program(options(), tuning, 32_800));
    let on = logits(Tuning::default());
    let off = logits(Tuning::without("matrix_attention").expect("a switch"));
    let largest = on.iter().fold(0f32, |m, x| m.max(x.abs()));
    let error = on.iter().zip(&off).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    println!("by {error} of {largest}");
    assert!(on.iter().all(|x| x.is_finite()) && largest > 0.1, "{largest}");
    assert!(error <= 0.01 * largest, "{error} of {largest}");
    assert!(on != off, "the ways round differently");
}
