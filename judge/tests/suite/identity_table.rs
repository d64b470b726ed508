//! The table of identities, and how often each is drawn.

use seamproof_judge::finding::Relation;
use seamproof_judge::identity::{TABLE, drawn};
#[test]
fn the_table_is_in_the_order_of_relations_and_names_are_theirs() {
    for (index, identity) in TABLE.iter().enumerate() {
        assert_eq!(identity.relation as usize, index);
        let json = serde_json::to_string(&identity.relation).expect("a name");
        assert_eq!(json, format!("\"{}\"", identity.relation.name()));
        assert!(!identity.sees.is_empty());
        assert_eq!(identity.twin.is_empty(), identity.runs == 0, "{}", identity.relation.name());
    }
}

#[test]
fn every_identity_is_drawn_and_cheap_ones_more_often() {
    let mut counts = [0; TABLE.len()];
    for identity in (0..20_000).flat_map(drawn) {
        counts[identity.relation as usize] += 1;
    }
    let history = counts[Relation::History as usize];
    for (identity, count) in TABLE.iter().zip(counts) {
        match identity.runs {
            _ if identity.stands_apart() => assert_eq!(count, 0),
            0 => assert_eq!(count, 20_000),
            1 => assert!(count > 600 && count > history * 3 / 2, "{} {count}", identity.relation.name()),
            _ => assert!(count > 100, "{} {count}", identity.relation.name()),
        }
    }
}
