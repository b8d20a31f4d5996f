//! Tests of what the command line reads.

use super::*;

fn options(command: &clap::Command) -> Vec<String> {
    let own = command.get_arguments().filter(|argument| {
        !argument.is_positional()
            && argument.get_action().takes_values()
            && !argument.is_allow_negative_numbers_set()
    });
    let own = own.map(|argument| format!("{} {}", command.get_name(), argument.get_id()));
    own.chain(command.get_subcommands().flat_map(options)).collect()
}

#[test]
fn a_negative_number_is_a_value_of_every_option() {
    let mut command = command();
    command.build();
    assert_eq!(options(&command), Vec::<String>::new());
    let read = |words: &[&str]| command.clone().try_get_matches_from(words);
    let common = ["longdraft", "generate", "--target", "t"];
    assert!(read(&[&common[..], &["--temperature", "-1"]].concat()).is_ok());
    let error = read(&[&common[..], &["--seed", "-1"]].concat()).expect_err("refused");
    assert!(error.to_string().contains("invalid value '-1' for '--seed"), "{error}");
    let error = read(&[&common[..], &["-1"]].concat()).expect_err("refused");
    assert!(error.to_string().contains("unexpected argument '-1'"), "{error}");
}

#[test]
fn what_every_command_takes_stands_at_the_end_of_its_help() {
    let mut command = command();
    command.build();
    let generate = command.find_subcommand_mut("generate").expect("generate");
    let help = generate.render_long_help().to_string();
    let at = |part: &str| help.find(part).unwrap_or_else(|| panic!("{part} not in {help}"));
    assert!(at("--prompt ") < at("Drafting:") && at("Drafting:") < at("Sampling:"), "{help}");
    assert!(at("Sampling:") < at("Global options:"), "{help}");
    assert!(at("Global options:") < at("--threads"), "{help}");
}

/// What these words read, as `Debug` shows it, or how they are refused.
fn shown(words: &str) -> Result<String, String> {
    let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
    let read = Cli::try_read(&words).map_err(|error| error.to_string())?;
    Ok(format!("{read:?}"))
}

#[test]
fn a_target_in_the_wrong_place_is_told_where_it_belongs() {
    for (words, tip) in [
        ("serve --target model.gguf", "tip: the target stands here without an option"),
        ("fit --target model.gguf", "tip: the target stands here without an option"),
        ("generate model.gguf", "tip: the target is named by an option: --target MODEL"),
        ("generate --targt model.gguf", "tip: a similar argument exists: '--target'"),
    ] {
        let refused = shown(&format!("longdraft {words}")).expect_err("no such argument");
        assert!(refused.contains(tip), "{refused}");
        assert_eq!(refused.matches("tip:").count(), 1, "{refused}");
    }
    // The target is there: the word is something else.
    for words in ["generate --target model.gguf a", "generate --target=model.gguf a"] {
        let refused = shown(&format!("longdraft {words}")).expect_err("no such argument");
        assert!(refused.contains("'a'") && !refused.contains("tip:"), "{refused}");
    }
}

#[test]
fn what_is_no_number_is_told_what_number_is_wanted() {
    let whole = "tip: give a whole number that is not negative, such as 8";
    let many = format!("--threads 1{} doctor", "0".repeat(30));
    for (words, tip) in [
        ("--threads many doctor", whole),
        ("--threads -1 doctor", whole),
        ("train a.yaml --ranks two", whole),
        (many.as_str(), "tip: give a smaller whole number"),
        ("generate --target t --prompt a --temperature hot", "tip: give a number, such as 0.8"),
        ("eval held-out a.yaml --contexts 8,0", "tip: give a whole number from 1 on, such as 8"),
    ] {
        let refused = shown(&format!("longdraft {words}")).expect_err("no number");
        assert!(refused.contains(tip), "{refused}");
        assert_eq!(refused.matches("tip:").count(), 1, "{refused}");
    }
    assert!(shown("longdraft --threads 0 doctor").expect("read").contains("threads: Some(0)"));
}

/// Names of values, and what each is.
type Choices = &'static [(&'static str, &'static str)];

#[test]
fn a_name_of_a_value_reads_the_choice_of_this_name() {
    let options: [(&str, Choices); 8] = [
        ("parity case --precision", &[("f32", "F32"), ("bf16", "Bf16")]),
        (
            "data inspect rows.jsonl --learn",
            &[
                ("all", "Some(All)"),
                ("no-system", "Some(NoSystem)"),
                ("assistant", "Some(Assistant)"),
                ("last", "Some(Last)"),
                ("answer", "Some(Answer)"),
            ],
        ),
        ("lm score model --data rows --tail", &[("score", "Score"), ("drop", "Drop")]),
        ("lm quantize model --output file --format", &[("compat", "Compat"), ("modern", "Modern")]),
        ("lm quantize model --output file --embedding", &[("codes", "Codes"), ("f16", "F16")]),
        ("lm quantize model --output file --compression", &[("zlib", "Zlib"), ("zstd", "Zstd")]),
        ("doctor --ops", &[("fused", "Fused"), ("composed", "Composed")]),
        ("doctor --simd", &[("none", "None"), ("avx2", "Avx2"), ("widest", "Widest")]),
    ];
    for (words, values) in options {
        let field = words.rsplit("--").next().expect("an option");
        for (name, choice) in values {
            let read = shown(&format!("longdraft {words} {name}")).expect("known");
            assert!(read.contains(&format!("{field}: {choice}")), "{words} {name}: {read}");
        }
        let refused = shown(&format!("longdraft {words} other")).expect_err("no such value");
        let names: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
        let known = format!("[possible values: {}", names.join(", "));
        assert!(refused.contains(&known), "{refused}");
    }
    let read = shown("longdraft parity case").expect("defaults");
    for default in ["precision: F32", "ops: Fused", "simd: Widest"] {
        assert!(read.contains(default), "{default} not in {read}");
    }
}
