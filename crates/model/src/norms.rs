//! Norm weights by value: was the offset of one added once?
//!
//! The original stores the scale of most norms minus one; MLX checkpoints store the scale itself. A
//! converter that adds one twice, or never, leaves a file that is well formed and wrong.

use crate::bind::Layout;
use crate::error::ModelError;
use crate::lower::Lowered;

/// With the offset added once scales lie around 1. Bounds for nearly all of them, far from any real model's.
const LOWEST: f32 = 0.7;
const HIGHEST: f32 = 1.3;
/// Share of the scales that must lie beyond a bound before the file is refused.
const SHARE: f64 = 0.99;

pub(crate) fn check(lowered: &Lowered, layout: Layout) -> Result<(), ModelError> {
    let mut scales: Vec<f32> = Vec::new();
    for id in &lowered.centred_norms {
        let i = id.0 as usize;
        scales.extend(lowered.weights[i].as_ref().row(&lowered.plan.weights[i], 0, 0));
    }
    verdict(&scales, layout)
}

fn verdict(scales: &[f32], layout: Layout) -> Result<(), ModelError> {
    if let Some(x) = scales.iter().find(|x| !x.is_finite()) {
        return Err(ModelError::Norms { problem: format!("hold the value {x}") });
    }
    let share = |f: &dyn Fn(f32) -> bool| {
        scales.iter().filter(|x| f(**x)).count() as f64 / scales.len().max(1) as f64
    };
    let problem = if share(&|x| x > HIGHEST) > SHARE {
        "lie near 2: the offset of one was added twice"
    } else if share(&|x| x < LOWEST) > SHARE {
        "lie near 0: the offset of one was never added"
    } else {
        return Ok(());
    };
    let layout = match layout {
        Layout::Mlx => "MLX layout",
        Layout::HuggingFace => "original layout, with the offset added while loading",
    };
    Err(ModelError::Norms { problem: format!("{problem} ({layout})") })
}
