//! Numerics against a reference: teacher-forced perplexity and the most probable tokens.

use serde_json::Value;

/// Fewer positions say too little.
pub const MIN_POSITIONS: usize = 192;

/// A text and what a reference says of each of its tokens from the second on.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// What text it is.
    pub name: String,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Natural log-probability of each token from the second on.
    pub logprob: Vec<f64>,
    /// The most probable token where each of these stands, if the reference tells.
    pub top1: Option<Vec<u32>>,
}

/// Reads a file of references: `passages` (as `models/demo/golden/perplexity.json`) have one log-probability less
/// than ids, `sequences` (as `logprobs.json` beside it) have as many, of which the first says nothing.
///
/// # Errors
/// What is wrong with the file, in words.
pub fn parse_references(text: &str) -> Result<Vec<Reference>, String> {
    let value: Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
    let list = value["passages"].as_array().or_else(|| value["sequences"].as_array());
    let list = list.ok_or("it has neither passages nor sequences")?;
    list.iter().enumerate().map(|(i, entry)| parse_reference(i, entry)).collect()
}

fn parse_reference(i: usize, entry: &Value) -> Result<Reference, String> {
    let name = entry["name"].as_str().map_or_else(|| format!("text {i}"), str::to_owned);
    let bad = |what: &str| format!("{name}: {what}");
    let ids = ids(&entry["ids"]).ok_or_else(|| bad("ids is no list of token ids"))?;
    let logprob = entry["logprob"].as_array().ok_or_else(|| bad("logprob is no list"))?;
    // The first of a sequence may be null: nothing stands before it.
    let logprob = match logprob.len() {
        n if n == ids.len() && n > 0 => &logprob[1..],
        _ => &logprob[..],
    };
    if ids.len() < 2 || logprob.len() + 1 != ids.len() {
        return Err(bad(&format!("{} ids and {} log-probabilities", ids.len(), logprob.len())));
    }
    let logprob: Option<Vec<f64>> = logprob.iter().map(Value::as_f64).collect();
    let logprob = logprob.ok_or_else(|| bad("logprob has something that is no number"))?;
    // top1[i] follows ids[i]; after the last id nothing is compared.
    let top1 = match &entry["top1"] {
        Value::Null => None,
        list => {
            let mut top1 = self::ids(list).ok_or_else(|| bad("top1 is no list of token ids"))?;
            top1.truncate(logprob.len());
            if top1.len() < logprob.len() {
                return Err(bad("top1 is shorter than logprob"));
            }
            Some(top1)
        }
    };
    Ok(Reference { name, ids, logprob, top1 })
}

fn ids(value: &Value) -> Option<Vec<u32>> {
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    value.as_array()?.iter().map(id).collect()
}

/// What Lily says of a text, as a reference says it.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// Natural log-probability of each token from the second on.
    pub logprob: Vec<f64>,
    /// The most probable token in its place.
    pub top1: Vec<u32>,
}

/// How far the two are apart.
#[derive(Clone, Debug, PartialEq)]
pub struct Agreement {
    /// What text, or all.
    pub name: String,
    /// Positions compared.
    pub positions: usize,
    /// The reference's perplexity.
    pub reference: f64,
    /// Lily's.
    pub own: f64,
    /// Positions whose most probable tokens are equal, of those that the reference tells.
    pub top1: Option<(usize, usize)>,
    /// Mean of the absolute differences of log-probabilities. It hardly hangs on the order of sums, as the ratio does, whose
    /// differences have both signs.
    pub mean: f64,
    /// Largest difference of two log-probabilities.
    pub worst: f64,
}

impl Agreement {
    /// Lily's perplexity over the reference's.
    pub fn ratio(&self) -> f64 {
        self.own / self.reference
    }
}

/// Compares each text, and all of them together as the last entry.
pub fn compare(references: &[Reference], scored: &[Scored]) -> Vec<Agreement> {
    let pairs: Vec<(&Reference, &Scored)> = references.iter().zip(scored).collect();
    let mut all: Vec<Agreement> =
        pairs.iter().map(|pair| agreement(&pair.0.name, &[*pair])).collect();
    all.push(agreement("all", &pairs));
    all
}

fn agreement(name: &str, pairs: &[(&Reference, &Scored)]) -> Agreement {
    let (mut reference, mut own, mut apart, mut worst, mut positions) = (0.0, 0.0, 0f64, 0f64, 0);
    let mut top1 = None;
    for (r, s) in pairs {
        for (a, b) in r.logprob.iter().zip(&s.logprob) {
            reference -= a;
            own -= b;
            apart += (a - b).abs();
            // A NaN must not get lost.
            worst = if (a - b).abs() <= worst { worst } else { (a - b).abs() };
            positions += 1;
        }
        if let Some(known) = &r.top1 {
            let equal = known.iter().zip(&s.top1).filter(|(a, b)| a == b).count();
            let (sum, of) = top1.unwrap_or((0, 0));
            top1 = Some((sum + equal, of + known.len()));
        }
    }
    let perplexity = |sum: f64| (sum / positions as f64).exp();
    Agreement {
        name: name.to_owned(),
        positions,
        reference: perplexity(reference),
        own: perplexity(own),
        top1,
        mean: apart / positions as f64,
        worst,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_files() {
        let passages = r#"{"passages":[{"name":"a","ids":[5,6,7],"logprob":[-1.0,-2.0]}]}"#;
        let a = parse_references(passages).unwrap().remove(0);
        assert_eq!((a.ids, a.logprob, a.top1), (vec![5, 6, 7], vec![-1.0, -2.0], None));
        let sequences =
            r#"{"sequences":[{"ids":[5,6,7],"logprob":[null,-1.5,-2.5],"top1":[6,9,1]}]}"#;
        let b = parse_references(sequences).unwrap().remove(0);
        assert_eq!((b.logprob, b.top1), (vec![-1.5, -2.5], Some(vec![6, 9])));
        assert_eq!(b.name, "text 0");
        for (text, want) in [
            ("{", "not JSON"),
            ("{}", "neither"),
            (r#"{"passages":[{"ids":[1,2,3],"logprob":[-1]}]}"#, "3 ids and 1"),
            (r#"{"passages":[{"ids":[1,-2],"logprob":[-1]}]}"#, "token ids"),
            (r#"{"passages":[{"ids":[1,2],"logprob":["x"]}]}"#, "no number"),
            (r#"{"passages":[{"ids":[1],"logprob":[]}]}"#, "1 ids"),
            (r#"{"passages":[{"ids":[1,2],"logprob":[-1],"top1":[]}]}"#, "shorter"),
        ] {
            let error = parse_references(text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
    }

    #[test]
    fn perplexities_and_agreement() {
        let reference = |logprob: Vec<f64>, top1| Reference {
            name: "t".into(),
            ids: vec![0; logprob.len() + 1],
            logprob,
            top1,
        };
        let references = [
            reference(vec![-(2f64.ln()); 4], Some(vec![1, 2, 3, 4])),
            reference(vec![-(8f64.ln()); 2], None),
        ];
        let scored = [
            Scored { logprob: vec![-(4f64.ln()); 4], top1: vec![1, 2, 3, 9] },
            Scored { logprob: vec![-(8f64.ln()); 2], top1: vec![0, 0] },
        ];
        let all = compare(&references, &scored);
        assert_eq!(all.len(), 3);
        assert!((all[0].reference - 2.0).abs() < 1e-12 && (all[0].own - 4.0).abs() < 1e-12);
        assert_eq!(all[0].top1, Some((3, 4)));
        assert!((all[0].worst - 2f64.ln()).abs() < 1e-12);
        assert_eq!((all[1].top1, all[1].ratio()), (None, 1.0));
        assert_eq!((all[1].mean, all[0].mean), (0.0, all[0].worst));
        // Of six positions, four are twice as uncertain: 2^(4/6).
        assert!((all[2].ratio() - 2f64.powf(4.0 / 6.0)).abs() < 1e-12);
        assert_eq!((all[2].positions, all[2].top1), (6, Some((3, 4))));
        assert!((all[2].mean - 4.0 / 6.0 * 2f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn differences_of_both_signs_do_not_cancel() {
        let texts = r#"{"passages":[{"ids":[5,6,7],"logprob":[-1.0,-2.0]}]}"#;
        let scored = Scored { logprob: vec![-1.5, -1.5], top1: vec![6, 7] };
        let all = compare(&parse_references(texts).unwrap(), &[scored]);
        assert_eq!((all[1].ratio(), all[1].mean, all[1].worst), (1.0, 0.5, 0.5));
        let scored = Scored { logprob: vec![f64::NAN, -1.5], top1: vec![6, 7] };
        assert!(compare(&parse_references(texts).unwrap(), &[scored])[1].mean.is_nan());
    }
}
