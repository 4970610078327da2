//! Norm weights by value: was the offset of one added once?
//!
//! The original stores the scale of most norms minus one; MLX checkpoints store the scale itself. A
//! converter that adds one twice, or never, leaves a file that is well formed and wrong.
//!
//! Trained scales drift: in the demo model half of them lie under 0.6. But they stay positive, so scales
//! without the offset are negative in numbers, and with the offset added twice hardly any lies under 1.3.

use crate::bind::Layout;
use crate::error::ModelError;
use crate::lower::Lowered;

/// Above this lie nearly all scales to which one was added twice.
const HIGH: f32 = 1.3;
/// Share of scales above [`HIGH`] from which on a file is refused.
const MOST_HIGH: f64 = 0.99;
/// Share of scales that are not positive from which on a file is refused.
const MOST_NEGATIVE: f64 = 0.1;

pub(crate) fn check(lowered: &Lowered, layout: Layout) -> Result<(), ModelError> {
    let mut scales: Vec<f32> = Vec::new();
    for id in &lowered.centred_norms {
        let i = id.0 as usize;
        let spec = &lowered.plan.weights[i];
        let row = lowered.weights[i].as_ref().row(spec, 0, 0);
        if let Some(x) = row.iter().find(|x| !x.is_finite()) {
            let problem = format!("{} holds the value {x}", spec.role);
            return Err(ModelError::Norms { problem });
        }
        scales.extend(row);
    }
    verdict(&scales, layout)
}

fn verdict(scales: &[f32], layout: Layout) -> Result<(), ModelError> {
    let share = |f: fn(&f32) -> bool| {
        scales.iter().filter(|x| f(x)).count() as f64 / scales.len().max(1) as f64
    };
    let (high, negative) = (share(|x| *x > HIGH), share(|x| *x <= 0.0));
    let problem = if high > MOST_HIGH {
        format!("{:.0} % lie above {HIGH}: one was added to them twice", 100.0 * high)
    } else if negative > MOST_NEGATIVE {
        format!("{:.0} % are not positive: one was never added to them", 100.0 * negative)
    } else {
        return Ok(());
    };
    let layout = match layout {
        Layout::Mlx => "MLX layout: the file holds the scales",
        Layout::HuggingFace => "original layout: one is added while loading",
    };
    Err(ModelError::Norms { problem: format!("{problem} ({layout})") })
}
