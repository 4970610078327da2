//! K and V of a decode step, each read alone as attention reads them, in both ways of `coalesced_kv`.

use std::sync::Arc;

use lily_device::CacheRead as Time;
use lily_ops::{ElementType, Op};

use super::GpuProgram;
use super::measure::{Meter, Moved, count_as, time};
use super::record::Kind;
use crate::driver::{Driver, DriverError, Placement};
use crate::kernels::attention::{CacheRead, read_cache};
use crate::kernels::common::{Context, StepShape};
use crate::list::{CommandList, Operand, Recorder};
use crate::text::Text;

impl GpuProgram {
    /// Reads the cache of a decode step's slots, the longest of which has `context` tokens with the step's; prompts are passed over.
    pub(super) fn read_caches(
        &mut self,
        kind: &Kind,
        context: usize,
        before: &Moved,
        meter: &mut Meter,
    ) -> Result<(), String> {
        if !kind.shape.is_decode() {
            return Ok(());
        }
        // Positions are those of the step that has ended: as many tokens as its attention saw.
        let put_back = before.write(&mut *self.driver, &self.memory, &self.io);
        put_back.and_then(|()| self.time_caches(kind, context, meter)).map_err(|e| e.to_string())
    }

    fn time_caches(
        &mut self,
        kind: &Kind,
        context: usize,
        meter: &mut Meter,
    ) -> Result<(), DriverError> {
        let Some(reader) = &meter.reader else { return Ok(()) };
        let flush = reader.flush();
        let exact =
            StepShape { context: kind.shape.context.min(context as u32), ..kind.shape.clone() };
        let tables = &self.memory.tables[kind.tables];
        let [c, own] = [kind.shape.clone(), exact].map(|step| self.recording.context(step, tables));
        let layers: Vec<(u32, usize)> = self
            .recording
            .plan()
            .nodes()
            .filter_map(|node| match &node.op {
                Op::Attention(op) => Some((op.heads as u32, op.layer)),
                _ => None,
            })
            .collect();
        let reads = |keys, coalesced| {
            layers.iter().map(move |&(heads, layer)| CacheRead { heads, layer, keys, coalesced })
        };
        let Some(sums) = reads(true, true).map(|read| read.sums(&c)).max() else { return Ok(()) };
        let text = Arc::new(Text::measuring(c.profile.platform, c.shape));
        let driver = &mut *self.driver;
        let bytes = (sums * 4).max(16);
        let buffer = driver.allocate("sums of K and V", bytes, Placement::Device)?;
        let out = Operand { buffer, offset: 0, bytes, element: ElementType::U32 };
        let mut ways = || {
            for (keys, coalesced) in [(true, true), (false, true), (true, false), (false, false)] {
                let mut list = record(reads(keys, coalesced), &c, out);
                count_as(&mut list, &record(reads(keys, coalesced), &own, out));
                let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
                list.pipelines = driver.pipelines(&text, &kernels)?;
                let launches = list.dispatches.len() as u64;
                // What it leaves is not what it reads.
                let left: u64 = reads(keys, coalesced).map(|read| read.sums(&own) * 4).sum();
                let bytes = list.dispatches.iter().map(|d| d.traffic).sum::<u64>() - left;
                let seconds = time(driver, Arc::new(list), |driver| sweep(driver, &flush))?;
                meter.times.add_cache(Time { keys, coalesced, launches, bytes, seconds });
            }
            Ok(())
        };
        let measured = ways();
        self.driver.release(buffer);
        meter.times.steps += 1;
        measured
    }
}

/// Everything else leaves the caches first: in a step the weights of the layers between see to that.
fn sweep(driver: &mut dyn Driver, flush: &Arc<CommandList>) -> Result<(), DriverError> {
    let submission = driver.submit(flush)?;
    driver.wait(submission).map(drop)
}

fn record(reads: impl Iterator<Item = CacheRead>, c: &Context, out: Operand) -> CommandList {
    let mut recorder = Recorder { op: "attention", ..Recorder::default() };
    reads.for_each(|read| read_cache(&mut recorder, c, &read, out));
    recorder.finish(false)
}
