//! Problems as the integers behind them.

use seamproof_judge::census::is_legal;
use seamproof_judge::generate::value_of;
use seamproof_judge::generate::{self, Draw, Limits};

#[test]
fn a_drawn_problem_comes_back_from_its_value() {
    let limits = Limits { products: &[u64::MAX], ..Limits::quick() };
    let (mut same, mut all) = (0, 0);
    for index in 0..600 {
        let Draw::Problem(problem) = generate::draw(8, index, &limits) else { continue };
        // Integers express neither refused formats nor an order of ranks or of pages.
        let is_shuffled = value_of(&problem).page_order != 0;
        if !is_legal(&problem)
            || is_shuffled
            || problem.parallel.ranks != (0..problem.parallel.size()).collect::<Vec<_>>()
        {
            continue;
        }
        all += 1;
        same += u32::from(generate::fixup(&value_of(&problem), &limits) == Draw::Problem(problem));
    }
    assert!(all > 300 && same * 100 >= all * 95, "{same} of {all}");
}

#[test]
fn a_value_has_the_widest_budget_of_any_table() {
    for limits in [Limits::quick(), Limits::seams(), Limits::fuzz()] {
        let widest = limits.products.iter().position(|&budget| budget == limits.products_max()).unwrap();
        let only = |entry: usize| Limits { products: &limits.products[entry..=entry], ..limits.clone() };
        let mut binding = 0;
        for index in 0..400 {
            let Draw::Problem(problem) = generate::draw(8, index, &Limits::quick()) else { continue };
            let value = value_of(&problem);
            let wide = generate::fixup(&value, &only(widest));
            binding += u32::from(generate::fixup(&value, &only(widest - 1)) != wide);
            assert_eq!(generate::fixup(&value, &limits), wide, "case {index}");
        }
        assert!(binding > 0, "no case needs the widest budget");
    }
}
