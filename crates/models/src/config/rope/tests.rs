use super::*;

#[test]
fn a_base_is_read_where_it_is_a_number() {
    let read = |config: &Value| {
        let mut problems = Problems::default();
        let rope = RopeParameters::from_json(config, 64, &mut problems);
        assert_eq!(problems, Problems::default());
        rope
    };
    let nested = json!({"rope_type": "default", "rope_theta": 5e5});
    let null = json!({"rope_theta": null, "rope_parameters": nested});
    assert_eq!(read(&null), RopeParameters::plain(5e5));
    let both = json!({"rope_theta": 1e6, "rope_parameters": nested});
    assert_eq!(read(&both), RopeParameters::plain(5e5));
    let null = json!({"rope_theta": 1e6, "rope_parameters": {"rope_theta": null}});
    assert_eq!(read(&null), RopeParameters::plain(1e6));
    assert_eq!(read(&json!({"rope_theta": null})), RopeParameters::plain(1e4));
    let mut problems = Problems::default();
    RopeParameters::from_json(&json!({"rope_theta": "big"}), 64, &mut problems);
    assert!(problems.to_string().contains("`rope_theta`"), "{problems}");
}

#[test]
fn the_older_object_wins_unless_it_is_empty() {
    let read = |older: Value| {
        let newer = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5});
        let config = json!({"rope_scaling": older, "rope_parameters": newer});
        RopeParameters::from_json(&config, 64, &mut Problems::default())
    };
    let linear = |theta, factor| RopeParameters {
        scaling: RopeScaling::Linear { factor },
        ..RopeParameters::plain(theta)
    };
    assert_eq!(read(Value::Null), linear(5e5, 4.0));
    assert_eq!(read(json!({})), linear(5e5, 4.0));
    assert_eq!(read(json!({"type": "linear", "factor": 2.0})), linear(1e4, 2.0));
}

#[test]
fn dynamic_scaling_is_plain_within_a_target_s_context_and_refused_of_drafts() {
    let read = |scaling: Value| {
        let mut problems = Problems::default();
        let config = json!({"rope_theta": 5e5, "rope_scaling": scaling});
        (RopeParameters::from_json(&config, 64, &mut problems), problems)
    };
    let plain = (RopeParameters::plain(5e5), Problems::default());
    assert_eq!(read(json!({"type": "dynamic", "factor": 4.0})), plain);
    assert_eq!(read(json!({"type": "dynamic", "factor": 4.0, "alpha": null})), plain);
    let without = read(json!({"type": "dynamic"})).1.to_string();
    assert!(without.contains("`dynamic` needs a positive `factor`"), "{without}");
    let alpha = read(json!({"type": "dynamic", "factor": 1.0, "alpha": 1000.0})).1.to_string();
    assert!(alpha.contains("`alpha`"), "{alpha}");
    let scaling = json!({"rope_type": "dynamic", "factor": 4.0});
    for config in
        [json!({"rope_scaling": scaling}), json!({"rope_parameters": {"full_attention": scaling}})]
    {
        let mut problems = Problems::default();
        RopeParameters::of_draft(&config, (64, &["full_attention"]), &mut problems);
        assert!(problems.to_string().contains("of a draft"), "{config}: {problems}");
    }
}

#[test]
fn drafts_whose_heads_turn_in_part_are_refused() {
    let read = |config: &Value| {
        let mut problems = Problems::default();
        RopeParameters::of_draft(config, (64, &["full_attention"]), &mut problems);
        problems.to_string()
    };
    let part = json!({TURNING: 0.5});
    for config in [
        part.clone(),
        json!({"rope_parameters": part}),
        json!({"rope_scaling": part}),
        json!({"rope_parameters": {"sliding_attention": part}}),
        json!({TURNING: "half"}),
    ] {
        assert!(read(&config).contains("`partial_rotary_factor`"), "{config}");
    }
    for whole in [json!(1), json!(1.0), Value::Null] {
        assert_eq!(read(&json!({TURNING: whole})), Problems::default().to_string());
    }
}

#[test]
fn rotary_keys_of_drafts_that_are_of_another_kind_are_named() {
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "attn_factor": "1"});
    for (config, named) in [
        (json!({"rope_scaling": "linear"}), "`rope_scaling` = \"linear\" is not an object"),
        (json!({"rope_scaling": {"type": 5, "factor": 2.0}}), "`type` = 5 is not a text"),
        (
            json!({"rope_parameters": {"full_attention": {"rope_type": true}}}),
            "`rope_type` = true is not a text",
        ),
        (json!({"rope_scaling": yarn}), "`attn_factor` = \"1\" is not a number"),
        (json!({DIVISORS: "1"}), "`rope_divisors` is not a list of numbers"),
        (json!({DIVISORS: [1.0, "2"]}), "`rope_divisors` is not a list of numbers"),
    ] {
        let mut problems = Problems::default();
        RopeParameters::of_draft(&config, (64, &["full_attention"]), &mut problems);
        assert_eq!(problems.0, [named], "{config}");
    }
}

#[test]
fn the_original_context_stands_at_either_place_or_is_all_of_the_context() {
    let original = |outer: Value, inner: Value| {
        let config = json!({
            ORIGINAL_CONTEXT: outer,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, ORIGINAL_CONTEXT: inner
            }
        });
        let mut problems = Problems::default();
        let rope = RopeParameters::from_json(&config, 64, &mut problems).to_json();
        (rope[ORIGINAL_CONTEXT].as_u64(), problems.0.len())
    };
    assert_eq!(original(Value::Null, Value::Null), (Some(64), 0));
    assert_eq!(original(Value::Null, json!(32)), (Some(32), 0));
    assert_eq!(original(json!(16), json!(32)), (Some(16), 0));
    assert_eq!(original(Value::Null, json!(0)).1, 1);
}

#[test]
fn a_multiplier_of_0_is_none() {
    let factor = |mscale, all| yarn_attention_factor(8.0, None, Some(mscale), Some(all));
    let plain = 0.1 * 8.0_f64.ln() + 1.0;
    for (mscale, all) in [(0.0, 0.0), (0.707, 0.0), (0.0, 0.707)] {
        assert!((factor(mscale, all) - plain).abs() < 1e-12, "{mscale} {all}");
    }
    assert!((factor(1.0, 0.5) - plain / (0.05 * 8.0_f64.ln() + 1.0)).abs() < 1e-12);
}
