//! Options that several commands share, and the reading of their texts.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use seamproof_judge::subjects::Options;

use crate::backends::{BESIDE, BITS_OF};

/// Longest limit of time, a year.
const SECONDS_MAX: f64 = 366.0 * 86400.0;
/// Digits of a commit hash: SHA-1, SHA-256. An abbreviated one could also be a decimal number.
const HASH_DIGITS: [usize; 2] = [40, 64];
/// Digits of a hash that make a seed of 64 bits.
const SEED_DIGITS: usize = 16;

/// Returns a random seed.
pub(super) fn random_seed() -> u64 {
    RandomState::new().hash_one(())
}

/// Reads a seed: a decimal number, `0x` and hex digits, or a commit hash, of which the first 16 digits count.
pub(super) fn seed(text: &str) -> Result<u64, String> {
    let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
    let is_hash = HASH_DIGITS.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let read = match text.strip_prefix("0x") {
        Some(digits) => hex(digits),
        None if is_hash => hex(&text[..SEED_DIGITS]),
        None => text.parse().ok(),
    };
    read.ok_or_else(|| "write a number of 64 bits, 0x and hex digits, or a whole commit hash".to_owned())
}

/// Reads a duration such as `500ms`, `60s`, `2m`, `1.5h`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("write a number and ms, s, m or h, as in 60s".to_owned()),
    };
    let seconds = number.parse::<f64>().map_err(|_| format!("'{number}' is not a number"))? * factor;
    if !(0.0..=SECONDS_MAX).contains(&seconds) {
        return Err("use a time from 0 to a year".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Reads a duration above 0, since nothing ends in no time.
pub(super) fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("use more than 0".to_owned()),
        duration => Ok(duration),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_number_or_a_commit() {
        assert_eq!(seed("17"), Ok(17));
        assert_eq!(seed("0xFf"), Ok(255));
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        assert_eq!(seed("e068292123456789012345678901234567890123"), Ok(0xe068_2921_2345_6789));
        assert_eq!(seed(&"e068292123456789".repeat(4)), Ok(0xe068_2921_2345_6789));
        assert_eq!(seed("1844674407370955161600000000000000000000"), Ok(0x1844_6744_0737_0955));
        let overflow = "18446744073709551616";
        for wrong in ["", "-1", "0x", "e06", "e068292", "hello", "0x10000000000000000", "e068292é", overflow]
        {
            assert!(seed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_duration_has_a_unit() {
        assert_eq!(duration("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        assert!(positive_duration("0s").is_err() && positive_duration("0.0h").is_err());
        assert_eq!(positive_duration("1ms"), Ok(Duration::from_millis(1)));
        for wrong in ["", "60", "s", "-1s", "1e9h", "NaNs", "1d", "é1s"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}

/// A subject beside the one that is judged.
#[derive(clap::Args, Debug, Default)]
pub(super) struct BesideOptions {
    /// Also run every case on this subject, and hold the results of both to each other: within the bounds of both
    #[arg(long, value_name = "NAME")]
    beside: Option<String>,
    /// Both subjects are to give the same bits
    #[arg(long, requires = "beside")]
    bitwise: bool,
}

impl BesideOptions {
    /// Returns a subject's options with the other subject among them.
    pub(super) fn among(&self, mut options: Options) -> Options {
        let option = if self.bitwise { BITS_OF } else { BESIDE };
        options.extend(self.beside.clone().map(|name| (option.to_owned(), name)));
        options
    }
}
