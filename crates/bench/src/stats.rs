//! Medians and spreads.

/// What repeated measurements of one thing say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The middle one, or the mean of the two middle ones.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
}

impl Summary {
    /// Of at least one number.
    pub fn of(values: &[f64]) -> Option<Self> {
        let min = values.iter().copied().reduce(f64::min)?;
        let max = values.iter().copied().reduce(f64::max)?;
        Some(Self { median: median(values)?, min, max })
    }

    /// How far the extremes lie apart, as a fraction of the median.
    pub fn spread(&self) -> f64 {
        (self.max - self.min) / self.median
    }

    /// The same measurements seen through `1/x`, scaled: seconds become tokens a second.
    pub fn inverse(values: &[f64], scale: f64) -> Option<Self> {
        let inverse: Vec<f64> = values.iter().map(|v| scale / v).collect();
        Self::of(&inverse)
    }
}

/// The median of at least one number.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// The arithmetic mean of at least one number.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_means() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 100.0]), Some(3.0));
        assert_eq!(mean(&[]), None);
        assert_eq!(mean(&[1.0, 2.0, 6.0]), Some(3.0));
    }

    #[test]
    fn summaries() {
        assert_eq!(Summary::of(&[]), None);
        let s = Summary::of(&[2.0, 5.0, 1.0]).unwrap();
        assert_eq!((s.median, s.min, s.max, s.spread()), (2.0, 1.0, 5.0, 2.0));
        let s = Summary::inverse(&[2.0, 5.0, 1.0], 10.0).unwrap();
        assert_eq!((s.median, s.min, s.max), (5.0, 2.0, 10.0));
    }
}
