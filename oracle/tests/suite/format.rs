//! Rounding and codes of every format, against definitions that share nothing with the implementation.

use seamproof_oracle::{E8m0, Format};

/// The formats whose codes can all be tried.
const NARROW: [Format; 4] = [Format::Bf16, Format::Fp16, Format::E4m3, Format::E5m2];

/// Returns the number that `code` stands for, read off the format's published layout bit by bit.
fn meaning(format: Format, code: u32) -> f64 {
    let (exponent_bits, fraction_bits, bias) = match format {
        Format::F32 => (8, 23, 127),
        Format::Bf16 => (8, 7, 127),
        Format::Fp16 => (5, 10, 15),
        Format::E4m3 => (4, 3, 7),
        Format::E5m2 => (5, 2, 15),
    };
    let bit = |index: i32| (code >> index) & 1;
    let exponent = (0..exponent_bits).map(|i| (bit(fraction_bits + i) << i) as i32).sum::<i32>();
    let fraction = (0..fraction_bits).map(|i| f64::from(bit(i)) * 2f64.powi(i - fraction_bits)).sum::<f64>();
    let sign = if bit(fraction_bits + exponent_bits) == 1 { -1.0 } else { 1.0 };
    let all_ones = exponent == (1 << exponent_bits) - 1;
    let fraction_ones = fraction == 1.0 - 2f64.powi(-fraction_bits);
    match format {
        Format::E4m3 if all_ones && fraction_ones => f64::NAN,
        Format::E4m3 => sign * finite(exponent, fraction, bias),
        _ if all_ones && fraction == 0.0 => sign * f64::INFINITY,
        _ if all_ones => f64::NAN,
        _ => sign * finite(exponent, fraction, bias),
    }
}

fn finite(exponent: i32, fraction: f64, bias: i32) -> f64 {
    match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    }
}

/// Returns the finite numbers that are not negative, in order: the number at index `c` has code `c`.
fn numbers(format: Format) -> Vec<f64> {
    (0..1u32 << (format.bits() - 1)).map(|code| meaning(format, code)).take_while(|x| x.is_finite()).collect()
}

/// Whether two numbers have equal bits. Any NaN equals any other.
fn same(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Returns well-mixed bits for a counter (splitmix64).
fn hash(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Checks `round`, `encode` and, where the value is an f32, `round_f32` against the expected result, for both signs.
fn check(format: Format, value: f64, expected: f64) {
    for (value, expected) in [(value, expected), (-value, -expected)] {
        let got = format.round(value);
        assert!(same(got, expected), "{format}: {value:e} rounds to {got:e}, not {expected:e}");
        assert!(same(meaning(format, format.encode(value)), expected), "{format}: code of {value:e}");
        let narrow = value as f32;
        if same(f64::from(narrow), value) {
            let got = f64::from(format.round_f32(narrow));
            assert!(same(got, expected), "{format}: f32 {value:e} rounds to {got:e}, not {expected:e}");
        }
    }
}

#[test]
fn every_code_means_what_the_layout_says() {
    for format in NARROW {
        for code in 0..1u32 << format.bits() {
            let (got, expected) = (format.decode(code), meaning(format, code));
            assert!(same(got, expected), "{format} code {code:x}: {got:e}, not {expected:e}");
        }
    }
    for code in (0..1 << 16).map(|counter| hash(counter) as u32) {
        let expected = f64::from(f32::from_bits(code));
        assert!(same(Format::F32.decode(code), expected), "f32 code {code:x}");
        assert!(same(meaning(Format::F32, code), expected), "f32 code {code:x}");
    }
}

#[test]
fn every_code_is_given_back() {
    for format in NARROW {
        for code in 0..1u32 << format.bits() {
            let number = format.decode(code);
            let expected = match format {
                _ if number.is_nan() => format.encode(f64::NAN),
                // Conversions to E5M2 saturate and never make its infinities.
                Format::E5m2 if number.is_infinite() => format.encode(57344f64.copysign(number)),
                _ => code,
            };
            assert_eq!(format.encode(number), expected, "{format} code {code:x}");
        }
    }
    for code in (0..1 << 16).map(|counter| hash(counter) as u32) {
        let number = f32::from_bits(code);
        let expected = if number.is_nan() { 0x7fc0_0000 } else { code };
        assert_eq!(Format::F32.encode(f64::from(number)), expected, "f32 code {code:x}");
    }
}

#[test]
fn nan_has_one_code() {
    let codes = [0x7fc0_0000, 0x7fc0, 0x7e00, 0x7f, 0x7f];
    for (format, code) in Format::ALL.into_iter().zip(codes) {
        for nan in [f64::NAN, -f64::NAN, f64::from_bits(0x7ff0_0000_0000_0001)] {
            assert_eq!(format.encode(nan), code, "{format}");
            assert_eq!(format.round(nan).to_bits(), f64::NAN.to_bits(), "{format}");
        }
        assert!(meaning(format, code).is_nan(), "{format}");
        assert!(format.round_f32(-f32::NAN).is_nan(), "{format}");
    }
}

/// Checks that the midpoint of `below` and `above` goes to `even`, and numbers just beside the midpoint to the nearer
/// neighbour.
fn check_midpoint(format: Format, below: f64, above: f64, even: f64) {
    let middle = below / 2.0 + above / 2.0;
    check(format, middle, even);
    check(format, middle.next_down(), below);
    check(format, middle.next_up(), above);
    if same(f64::from(middle as f32), middle) {
        check(format, f64::from((middle as f32).next_down()), below);
        check(format, f64::from((middle as f32).next_up()), above);
    }
}

#[test]
fn between_neighbours_the_nearer_wins_and_ties_go_to_the_even_code() {
    for format in NARROW {
        let numbers = numbers(format);
        for (code, pair) in numbers.windows(2).enumerate() {
            check_midpoint(format, pair[0], pair[1], pair[code % 2]);
        }
    }
    for code in (0..1 << 14).map(|counter| hash(counter) as u32 % 0x7f7f_ffff) {
        let pair = [code, code + 1].map(|code| f64::from(f32::from_bits(code)));
        check_midpoint(Format::F32, pair[0], pair[1], pair[code as usize % 2]);
    }
}

#[test]
fn past_the_largest_number_ieee_formats_overflow_and_fp8_saturates() {
    for format in [Format::F32, Format::Bf16, Format::Fp16] {
        let largest = format.max_finite();
        // The number that would come next, had the format one more binade; the largest number's code is odd.
        let next = 2f64.powi(format.exponent_max() + 1);
        let threshold = largest / 2.0 + next / 2.0;
        check(format, threshold.next_down(), largest);
        for value in [threshold, threshold.next_up(), next, 1e300, f64::MAX, f64::INFINITY] {
            check(format, value, f64::INFINITY);
        }
    }
    for (format, values) in [
        (Format::E4m3, [448.0, 463.9, 464.0, 465.0, 480.0, 512.0, 1e300, f64::INFINITY]),
        (Format::E5m2, [57344.0, 61439.0, 61440.0, 61441.0, 65536.0, 1e5, f64::MAX, f64::INFINITY]),
    ] {
        for value in values {
            check(format, value, format.max_finite());
        }
    }
}

#[test]
fn zero_keeps_its_sign_and_so_does_what_rounds_to_it() {
    for format in Format::ALL {
        for value in [0.0, f64::MIN_POSITIVE, 5e-324, format.tiny_half()] {
            check(format, value, 0.0);
        }
        check(format, format.tiny_half().next_up(), 2.0 * format.tiny_half());
        assert_eq!(format.encode(-0.0), 1 << (format.bits() - 1), "{format}");
    }
}

#[test]
fn the_16_bit_formats_agree_with_the_half_crate() {
    for code in 0..=u16::MAX {
        let pairs = [
            (Format::Bf16, half::bf16::from_bits(code).to_f64()),
            (Format::Fp16, half::f16::from_bits(code).to_f64()),
        ];
        for (format, expected) in pairs {
            assert!(same(format.decode(u32::from(code)), expected), "{format} code {code:x}");
            if !expected.is_nan() {
                assert_eq!(format.encode(expected), u32::from(code), "{format} code {code:x}");
            }
        }
        // f32s at, between and just beside this number and the next.
        let next = code.wrapping_add(1);
        let bf16 = [code, next].map(|code| half::bf16::from_bits(code).to_f32());
        let fp16 = [code, next].map(|code| half::f16::from_bits(code).to_f32());
        for [number, next] in [bf16, fp16] {
            let middle = number / 2.0 + next / 2.0;
            for value in [number, middle].into_iter().flat_map(|x| [x.next_down(), x, x.next_up()]) {
                check(Format::Bf16, f64::from(value), half::bf16::from_f32(value).to_f64());
                check(Format::Fp16, f64::from(value), half::f16::from_f32(value).to_f64());
            }
        }
    }
    for bits in (0..1 << 18).map(hash) {
        // These f32s have any exponent at all, or an exponent where the 16-bit formats change from normal to subnormal
        // to zero. Only f32s are compared: `half` drops the low bits of an f64 before it rounds.
        let near = f32::from_bits(bits as u32 & !(0xff << 23) | (0x7f - 30 + (bits >> 32) as u32 % 50) << 23);
        for value in [f32::from_bits(bits as u32), near] {
            check(Format::Bf16, f64::from(value), half::bf16::from_f32(value).to_f64());
            check(Format::Fp16, f64::from(value), half::f16::from_f32(value).to_f64());
        }
        let value = f64::from_bits(bits);
        check(Format::F32, value, f64::from(value as f32));
    }
}

/// Returns the nearest number by a search among all numbers of the format. Of two equally near ones it is the one with
/// the even code.
fn nearest(numbers: &[f64], value: f64) -> f64 {
    let above = numbers.partition_point(|&number| number < value.abs());
    let below = above.saturating_sub(1);
    let Some(&upper) = numbers.get(above) else { return numbers[below].copysign(value) };
    let (down, up) = (value.abs() - numbers[below], upper - value.abs());
    let code = if down < up || (down == up && below % 2 == 0) { below } else { above };
    numbers[code].copysign(value)
}

#[test]
fn a_search_among_all_numbers_finds_the_same() {
    for format in NARROW {
        let numbers = numbers(format);
        let exponents = (format.exponent_max() - format.exponent_min() + 12) as u64;
        for bits in (0..1 << 16).map(hash) {
            let exponent = (1023 + format.exponent_min() - 10) as u64 + (bits >> 52) % exponents;
            let value = f64::from_bits(bits & !(0x7ff << 52) | exponent << 52);
            // Past the largest number the rules differ; they have a test of their own.
            if value.abs() <= format.max_finite() {
                check(format, value, nearest(&numbers, value));
            }
        }
    }
}

#[test]
fn round_f32_is_round_and_round_is_decode_of_encode() {
    for format in Format::ALL {
        for bits in (0..1 << 18).map(hash) {
            let near =
                f32::from_bits(bits as u32 & !(0xff << 23) | (0x7f - 20 + (bits >> 32) as u32 % 40) << 23);
            for value in [f32::from_bits(bits as u32), near] {
                let rounded = format.round(f64::from(value));
                assert!(same(f64::from(format.round_f32(value)), rounded), "{format}: {value:e}");
                assert!(same(format.decode(format.encode(f64::from(value))), rounded), "{format}: {value:e}");
            }
        }
    }
}

#[test]
fn constants_are_those_of_the_formats() {
    assert_eq!(Format::ALL.map(Format::bits), [32, 16, 16, 8, 8]);
    assert_eq!(
        Format::ALL.map(Format::unit_roundoff),
        [2f64.powi(-24), 2f64.powi(-8), 2f64.powi(-11), 2f64.powi(-4), 2f64.powi(-3)]
    );
    assert_eq!(Format::F32.max_finite(), f64::from(f32::MAX));
    assert_eq!(Format::E4m3.max_finite(), 448.0);
    assert_eq!(Format::E5m2.max_finite(), 57344.0);
    for format in NARROW {
        let numbers = numbers(format);
        assert_eq!(format.max_finite(), numbers[numbers.len() - 1], "{format}");
        assert_eq!(format.tiny_half(), numbers[1] / 2.0, "{format}");
    }
    assert_eq!(Format::F32.tiny_half(), 2f64.powi(-150));
}

#[test]
fn half_spacing_is_the_largest_error_that_exists() {
    for format in NARROW {
        let numbers = numbers(format);
        let mut largest = 0f64;
        for pair in numbers.windows(2) {
            let gap = pair[1] - pair[0];
            // The error grows up to the midpoint and falls behind the midpoint. The largest error so far is at one of
            // these parts.
            for part in [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0] {
                let magnitude = pair[0] + part * gap;
                largest = largest.max((format.round(magnitude) - magnitude).abs());
                assert_eq!(format.half_spacing(magnitude), largest, "{format} up to {magnitude:e}");
            }
        }
        let top_gap = numbers[numbers.len() - 1] - numbers[numbers.len() - 2];
        let threshold = format.max_finite() + top_gap / 2.0;
        assert_eq!(format.half_spacing(threshold.next_down()), top_gap / 2.0, "{format}");
        for magnitude in [threshold.next_up(), 2.0 * threshold, 1e300] {
            let error = (format.round(magnitude) - magnitude).abs();
            assert_eq!(format.half_spacing(magnitude), error, "{format} up to {magnitude:e}");
        }
        assert_eq!(format.half_spacing(f64::INFINITY), f64::INFINITY, "{format}");
        assert!(format.half_spacing(f64::NAN).is_nan(), "{format}");
    }
    assert_eq!(Format::F32.half_spacing(1.5), 2f64.powi(-24));
    assert_eq!(Format::F32.half_spacing(1.0), 2f64.powi(-25));
    assert_eq!(Format::F32.half_spacing(1e-40), 2f64.powi(-150));
    assert_eq!(Format::Bf16.half_spacing(f64::from(f32::MAX)), f64::INFINITY);
    assert_eq!(Format::E4m3.half_spacing(1000.0), 552.0);
}

#[test]
fn a_conversion_without_saturation_differs_past_the_largest_number_alone() {
    for format in Format::ALL {
        for value in (0..1 << 16).map(|counter| f64::from(f32::from_bits(hash(counter) as u32))) {
            let (kept, rounded) = (format.round_unsaturated(value), format.round(value));
            let past = format.saturates() && rounded.abs() == format.max_finite();
            assert!(past || same(kept, rounded), "{format}: {value:e} gives {kept:e}, not {rounded:e}");
        }
    }
    // The largest code of E4M3 is even and that of E5M2 odd: the midpoint past it stays in one and leaves in the other.
    let cases: [(Format, [(f64, u32); 8]); 2] = [
        (
            Format::E4m3,
            [
                (448.0, 0x7e),
                (464.0, 0x7e),
                (464f64.next_up(), 0x7f),
                (480.0, 0x7f),
                (f64::INFINITY, 0x7f),
                (-448.0, 0xfe),
                (-464.0, 0xfe),
                (-480.0, 0x7f),
            ],
        ),
        (
            Format::E5m2,
            [
                (57344.0, 0x7b),
                (61440f64.next_down(), 0x7b),
                (61440.0, 0x7c),
                (65536.0, 0x7c),
                (f64::INFINITY, 0x7c),
                (-57344.0, 0xfb),
                (-61440.0, 0xfc),
                (f64::NEG_INFINITY, 0xfc),
            ],
        ),
    ];
    for (format, cases) in cases {
        for (value, code) in cases {
            assert_eq!(format.encode_unsaturated(value), code, "{format}: {value:e}");
        }
        assert_eq!(format.encode_unsaturated(f64::NAN), 0x7f, "{format}");
        for code in (0..1u32 << 8).filter(|code| !format.decode(*code).is_nan()) {
            assert_eq!(format.encode_unsaturated(format.decode(code)), code, "{format} code {code:x}");
        }
    }
}

#[test]
fn every_code_of_e8m0_is_its_power_of_two_and_is_given_back() {
    for code in 0..=u8::MAX {
        let scale = E8m0::from_code(code);
        assert_eq!(scale.code(), code);
        if code == 255 {
            assert!(scale == E8m0::NAN && scale.value().is_nan());
            continue;
        }
        let value = scale.value();
        assert_eq!(value, 2f64.powi(i32::from(code) - 127), "code {code}");
        assert_eq!(f64::from(value as f32), value, "code {code} in f32");
        assert_eq!([E8m0::at_least(value), E8m0::at_most(value)], [scale; 2], "code {code}");
        assert_eq!(E8m0::at_most(value.next_down()).code(), code.saturating_sub(1), "below code {code}");
        assert_eq!(E8m0::at_least(value.next_up()).code(), (code + 1).min(254), "above code {code}");
        assert_eq!([E8m0::at_least(value.next_down()), E8m0::at_most(value.next_up())], [scale; 2]);
    }
    for small in [0.0, 5e-324, f64::MIN_POSITIVE] {
        assert_eq!([E8m0::at_least(small), E8m0::at_most(small)], [E8m0::from_code(0); 2], "{small:e}");
    }
    for large in [2f64.powi(128), 1e300, f64::INFINITY] {
        assert_eq!([E8m0::at_least(large), E8m0::at_most(large)], [E8m0::from_code(254); 2], "{large:e}");
    }
    assert_eq!([E8m0::at_least(f64::NAN), E8m0::at_most(f64::NAN)], [E8m0::NAN; 2]);
}
