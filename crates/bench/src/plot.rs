//! Line plots as SVG: lengths on a logarithmic axis, speeds from 0.

use std::fmt::Write as _;

/// A line of a plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Length and value, by length.
    pub points: Vec<(f64, f64)>,
}

/// A plot of curves over lengths.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// Above it.
    pub title: String,
    /// Below the axis of lengths.
    pub x: String,
    /// Beside the axis of values.
    pub y: String,
    /// Its curves.
    pub curves: Vec<Curve>,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 90.0;

/// Distinguishable with any colour vision, on white.
const COLOURS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

struct Scale {
    low: f64,
    high: f64,
    top: f64,
}

impl Scale {
    fn of(curves: &[Curve]) -> Option<Self> {
        let points = || curves.iter().flat_map(|c| &c.points);
        let low = points().map(|p| p.0).reduce(f64::min)?.max(1.0).log2();
        let high = points().map(|p| p.0).reduce(f64::max)?.max(1.0).log2();
        let top = points().map(|p| p.1).reduce(f64::max)?.max(f64::MIN_POSITIVE);
        // A single length stands in the middle.
        let (low, high) = if high > low { (low, high) } else { (low - 1.0, high + 1.0) };
        Some(Self { low, high, top: round_up(top) })
    }

    fn x(&self, length: f64) -> f64 {
        let part = (length.max(1.0).log2() - self.low) / (self.high - self.low);
        LEFT + part * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)
    }
}

/// The next of 1, 2, 2.5, 5, 10 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|step| step * power)
        .find(|v| *v >= value)
        .unwrap_or(10.0 * power)
}

impl Plot {
    /// The picture. A plot without points says so.
    pub fn svg(&self) -> String {
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
             viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
        );
        let middle = (LEFT + WIDTH - RIGHT) / 2.0;
        text(&mut out, middle, 24.0, "middle", &self.title);
        let Some(scale) = Scale::of(&self.curves) else {
            text(&mut out, middle, HEIGHT / 2.0, "middle", "nothing was measured");
            return out + "</svg>\n";
        };
        self.axes(&mut out, &scale);
        for (i, curve) in self.curves.iter().enumerate() {
            draw(&mut out, &scale, curve, COLOURS[i % COLOURS.len()]);
        }
        self.legend(&mut out);
        out + "</svg>\n"
    }

    fn axes(&self, out: &mut String, scale: &Scale) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for i in 0..=5 {
            let value = scale.top * f64::from(i) / 5.0;
            let y = scale.y(value);
            line(out, LEFT, y, right, y);
            text(out, LEFT - 8.0, y + 4.0, "end", &number(value));
        }
        let mut lengths: Vec<f64> =
            self.curves.iter().flat_map(|c| &c.points).map(|p| p.0).collect();
        lengths.sort_by(f64::total_cmp);
        lengths.dedup();
        for length in lengths {
            let x = scale.x(length);
            line(out, x, bottom, x, bottom + 5.0);
            text(out, x, bottom + 20.0, "middle", &tokens(length));
        }
        text(out, (LEFT + right) / 2.0, bottom + 40.0, "middle", &self.x);
        let (x, y) = (20.0, (TOP + bottom) / 2.0);
        let _ = writeln!(
            out,
            "<text x=\"{x}\" y=\"{y:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 {x} {y:.1})\">{}</text>",
            escaped(&self.y)
        );
    }

    fn legend(&self, out: &mut String) {
        let y = HEIGHT - 20.0;
        let mut x = LEFT;
        for (i, curve) in self.curves.iter().enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"14\" height=\"4\" fill=\"{colour}\"/>",
                y - 6.0
            );
            text(out, x + 20.0, y, "start", &curve.name);
            x += 45.0 + 7.5 * curve.name.chars().count() as f64;
        }
    }
}

fn draw(out: &mut String, scale: &Scale, curve: &Curve, colour: &str) {
    let at: Vec<(f64, f64)> = curve.points.iter().map(|p| (scale.x(p.0), scale.y(p.1))).collect();
    let path: Vec<String> = at.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        out,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
        path.join(" ")
    );
    for (x, y) in at {
        let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>");
    }
}

fn line(out: &mut String, x1: f64, y1: f64, x2: f64, y2: f64) {
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#cccccc\"/>"
    );
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, what: &str) {
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escaped(what)
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn tokens(n: f64) -> String {
    match n {
        n if n >= 1024.0 && n % 1024.0 == 0.0 => format!("{}K", n / 1024.0),
        n => format!("{n}"),
    }
}

fn number(value: f64) -> String {
    match value {
        v if v == v.trunc() => format!("{v}"),
        v if v >= 10.0 => format!("{v:.0}"),
        v => format!("{v:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>) -> Plot {
        let curve = Curve { name: "a<b & \"c\"".into(), points };
        let (title, x, y) = ("title".into(), "tokens".into(), "tokens a second".into());
        Plot { title, x, y, curves: vec![curve] }
    }

    #[test]
    fn points_lie_where_their_values_put_them() {
        let svg = plot(vec![(256.0, 50.0), (1024.0, 100.0), (4096.0, 0.0)]).svg();
        // Left edge at half height, middle at the top, right edge at the bottom.
        assert!(svg.contains("points=\"80.0,195.0 410.0,40.0 740.0,350.0\""), "{svg}");
        assert!(svg.contains(">256<") && svg.contains(">1K<") && svg.contains(">4K<"), "{svg}");
        assert!(svg.contains("a&lt;b &amp; &quot;c&quot;"), "{svg}");
        assert!(svg.ends_with("</svg>\n"));
    }

    #[test]
    fn nothing_and_one_point_are_plots_too() {
        assert!(plot(vec![]).svg().contains("nothing was measured"));
        let svg = plot(vec![(512.0, 3.0)]).svg();
        assert!(svg.contains("points=\"410.0,"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn axes_end_at_round_numbers() {
        for (value, want) in [(1.0, 1.0), (1.1, 2.0), (2.1, 2.5), (83.0, 100.0), (260.0, 500.0)] {
            assert_eq!(round_up(value), want, "{value}");
        }
        assert!((round_up(0.03) - 0.05).abs() < 1e-12);
    }
}
