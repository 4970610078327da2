//! The read that kernels are compared with: it reads every packet, and as often as it says.

use std::sync::Arc;

use lily_gpu::kernels::read::{Part, read};
use lily_gpu::{Driver, Operand, Placement, Platform, Recorder, Shape, Text};
use lily_ops::ElementType;
use lily_softgpu::{Options, SoftDriver};

/// The sum of what all threads of a grid sum up, reading some packets of a slab of numbered packets.
fn sum(grid: ([u32; 3], u32), first: u32, packets: u32, passes: u32) -> u32 {
    let mut driver = SoftDriver::new(Options::default());
    let bytes = 16 * 400;
    let slab = driver.allocate("slab", bytes, Placement::Device).unwrap();
    // The xor of a packet's four words is its number squared.
    let words: Vec<u8> =
        (0..400u32).flat_map(|i| [i * i, 5, 9, 5 ^ 9]).flat_map(u32::to_le_bytes).collect();
    driver.write(slab, 0, &words).unwrap();
    let (groups, threads) = grid;
    let count = groups.iter().product::<u32>() * threads;
    let out = driver.allocate("sums", u64::from(count) * 4, Placement::Device).unwrap();
    let bytes_out = u64::from(count) * 4;
    let out = Operand { buffer: out, offset: 0, bytes: bytes_out, element: ElementType::U32 };
    let part = Part { buffer: slab, bytes, first, packets, passes };
    let mut r = Recorder::default();
    read(&mut r, &part, grid, out, true);
    assert_eq!(r.dispatches[0].traffic, u64::from(packets * passes) * 16);
    let mut list = r.finish(true);
    let text = Arc::new(Text::measuring(Platform::Host, &Shape::default()));
    list.pipelines = driver.pipelines(&text, &["read_bytes"]).unwrap();
    let submission = driver.submit(&Arc::new(list)).unwrap();
    driver.wait(submission).unwrap();
    let mut sums = vec![0u8; bytes_out as usize];
    driver.read(out.buffer, 0, &mut sums).unwrap();
    let sums = sums.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
    sums.fold(0, u32::wrapping_add)
}

#[test]
fn every_packet_is_read_by_grids_of_any_shape() {
    let want = |first: u32, packets: u32| (first..first + packets).map(|i| i * i).sum::<u32>();
    for grid in [([1, 1, 1], 32), ([3, 1, 1], 32), ([2, 3, 2], 64)] {
        for (first, packets) in [(0, 400), (0, 1), (100, 300), (7, 129)] {
            assert_eq!(sum(grid, first, packets, 1), want(first, packets), "{grid:?} {packets}");
        }
        assert_eq!(sum(grid, 5, 100, 3), 3 * want(5, 100), "{grid:?}");
    }
}
