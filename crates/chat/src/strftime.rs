//! `strftime_now` of chat templates: the present time in UTC, in Python's format codes.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAY_SECONDS: u64 = 86_400;

/// Seconds since 1970, now.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// A moment, formatted. `Err` holds a format code that is not known.
pub(crate) fn at(unix_seconds: u64, format: &str) -> Result<String, char> {
    let (days, second_of_day) = (unix_seconds / DAY_SECONDS, unix_seconds % DAY_SECONDS);
    let (year, month, day, day_of_year) = civil_date(days);
    let (hour, minute, second) =
        (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let hour12 = (hour + 11) % 12 + 1;
    // 1970-01-01 was a Thursday.
    let weekday_number = (days + 4) % 7;
    let weekday = WEEKDAYS[weekday_number as usize];
    let monday_based = (weekday_number + 6) % 7 + 1;
    // The ISO year of a day is that of its Thursday; the week is counted from that year's first.
    let (iso_year, _, _, thursday) = civil_date((days + 4).saturating_sub(monday_based));
    let iso_week = (thursday - 1) / 7 + 1;
    let month_name = MONTHS[month as usize - 1];

    let mut out = String::with_capacity(format.len() + 16);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next().ok_or('%')?;
        // "%-d" is "%d" without the leading zero.
        let bare = code == '-';
        if bare {
            code = chars.next().ok_or('-')?;
        }
        let number = |value: u64, width: usize| {
            let width = if bare { 1 } else { width };
            format!("{value:0width$}")
        };
        let text = match code {
            'Y' => number(year, 4),
            'y' => number(year % 100, 2),
            'm' => number(month, 2),
            'd' => number(day, 2),
            'e' => format!("{day:2}"),
            'j' => number(day_of_year, 3),
            'H' => number(hour, 2),
            'I' => number(hour12, 2),
            'M' => number(minute, 2),
            'S' => number(second, 2),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'A' => weekday.into(),
            'a' => weekday[..3].into(),
            'B' => month_name.into(),
            'b' | 'h' => month_name[..3].into(),
            'F' => format!("{year:04}-{month:02}-{day:02}"),
            'D' | 'x' => format!("{month:02}/{day:02}/{:02}", year % 100),
            'R' => format!("{hour:02}:{minute:02}"),
            'w' => weekday_number.to_string(),
            'u' => monday_based.to_string(),
            // Weeks that begin on a Sunday, on a Monday, and those of ISO 8601.
            'U' => number((day_of_year + 6 - weekday_number) / 7, 2),
            'W' => number((day_of_year + 7 - monday_based) / 7, 2),
            'V' => number(iso_week, 2),
            'G' => number(iso_year, 4),
            'C' => number(year / 100, 2),
            'c' => format!(
                "{} {} {day:2} {hour:02}:{minute:02}:{second:02} {year}",
                &weekday[..3],
                &month_name[..3]
            ),
            's' => unix_seconds.to_string(),
            'f' => "000000".into(),
            'n' => "\n".into(),
            't' => "\t".into(),
            'T' | 'X' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".into(),
            'z' => "+0000".into(),
            '%' => "%".into(),
            unknown => return Err(unknown),
        };
        let _ = write!(out, "{text}");
    }
    Ok(out)
}

/// Year, month (from 1), day of month (from 1) and day of year (from 1) of a day since 1970.
fn civil_date(mut days: u64) -> (u64, u64, u64, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_calendar() {
        // `date -u -d @… +…` of GNU coreutils.
        assert_eq!(
            at(0, "%Y-%m-%d %H:%M:%S %A %j").as_deref(),
            Ok("1970-01-01 00:00:00 Thursday 001")
        );
        assert_eq!(at(1_709_211_599, "%d %b %Y, %I:%M %p").as_deref(), Ok("29 Feb 2024, 12:59 PM"));
        assert_eq!(
            at(1_735_689_599, "%F %T %a %-d %j").as_deref(),
            Ok("2024-12-31 23:59:59 Tue 31 366")
        );
        assert_eq!(at(4_102_444_800, "%B %-d, %y 100%%").as_deref(), Ok("January 1, 00 100%"));
        assert_eq!(
            at(1_735_689_599, "%G-W%V-%u %U %W %D %R").as_deref(),
            Ok("2025-W01-2 52 53 12/31/24 23:59")
        );
        assert_eq!(
            at(1_609_459_200, "%G %V %c").as_deref(),
            Ok("2020 53 Fri Jan  1 00:00:00 2021")
        );
        assert_eq!(at(0, "%Q"), Err('Q'));
    }
}
