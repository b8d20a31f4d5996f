//! What variables of launchers say.

use super::*;

fn reading(set: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
    move |name| {
        let found = set.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    }
}

fn of(set: &[(&str, &str)], has_mpi: bool) -> Result<Launch> {
    Launch::of(reading(set), has_mpi)
}

fn tcp(set: &[(&str, &str)]) -> Place {
    match of(set, false) {
        Ok(Launch::Tcp(place)) => place,
        other => panic!("{set:?}: {other:?}"),
    }
}

#[test]
fn mpi_launchers_are_told_apart_from_plain_shells() {
    let of = |set: &[(&str, &str)]| of(set, true).expect("sound");
    assert_eq!(of(&[]), Launch::Alone);
    assert_eq!(of(&[("SLURM_STEP_NUM_TASKS", "4")]), Launch::Alone);
    let open = [("OMPI_COMM_WORLD_SIZE", "3"), ("PMIX_RANK", "0")];
    assert_eq!(of(&open), Launch::Mpi(3));
    assert_eq!(of(&[("PMI_SIZE", "2")]), Launch::Mpi(2));
    let slurm = [("PMIX_RANK", "1"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "1")];
    assert_eq!(of(&slurm), Launch::Mpi(4));
    assert_eq!(of(&[("PMIX_RANK", "0")]), Launch::Mpi(1));
    assert_eq!((of(&[]).size(), of(&slurm).size()), (1, 4));
}

#[test]
fn torchruns_variables_name_a_place() {
    let set = [("RANK", "3"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "77")];
    let place = tcp(&set);
    assert_eq!((place.rank, place.size, place.address.as_str(), place.port), (3, 8, "a", 77));
    // Two jobs of one machine are two, also where one takes the other's next port.
    let other = [&set[..3], &[("MASTER_PORT", "78")]].concat();
    assert_ne!(tcp(&other).job, place.job);
    let own = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RUN_ID", "j")];
    let place = tcp(&[&set[..], &own].concat());
    assert_eq!((place.port, place.job.as_str()), (78, "j 77"), "torchrun listens at 77 itself");
    assert_eq!(tcp(&set[..3]).port, PORT);
    // One process is alone, wherever it would meet others.
    let one = [("RANK", "0"), ("WORLD_SIZE", "1")];
    assert_eq!(of(&one, false).expect("sound"), Launch::Alone);
    let lacks_rank = |set: &[(&str, &str)]| {
        of(set, false).expect("sound").require_rank_of(&reading(set)).is_err()
    };
    assert!(
        lacks_rank(&[("WORLD_SIZE", "2")])
            && lacks_rank(&[("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")])
    );
    assert!(!lacks_rank(&one) && !lacks_rank(&set) && !lacks_rank(&[("WORLD_SIZE", "1")]));
    for wrong in [
        &[("RANK", "0"), ("WORLD_SIZE", "2")][..],
        &[("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")],
        &[("RANK", "x"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")],
        &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")],
    ] {
        assert!(of(wrong, false).is_err(), "{wrong:?}");
    }
}

#[test]
fn a_job_of_its_own_goes_before_mpi() {
    let set = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("PMI_SIZE", "9")];
    assert_eq!(of(&set, true).expect("sound"), Launch::Mpi(9));
    let named = [&set[..], &[(JOB, "x")]].concat();
    let Ok(Launch::Tcp(place)) = of(&named, true) else { panic!("meets over TCP") };
    assert_eq!((place.rank, place.size, place.job.as_str()), (1, 2, "x"));
    // An agent of torchrun may be a process of MPI's launcher.
    let by_torchrun = [&set[..], &[(TORCHRUN_JOB, "y")]].concat();
    assert!(matches!(of(&by_torchrun, true), Ok(Launch::Tcp(_))));
}

#[test]
fn builds_without_mpi_meet_over_tcp_where_the_first_machine_is_named() {
    let set = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "2")];
    assert_eq!(of(&set, false).expect("sound"), Launch::Mpi(4));
    let place = tcp(&[&set[..], &[("MASTER_ADDR", "head")]].concat());
    assert_eq!((place.rank, place.size, place.address.as_str()), (2, 4, "head"));
}

#[test]
fn slurm_names_rank_machine_and_a_port_of_the_step() {
    let set = [
        ("SLURM_PROCID", "5"),
        ("SLURM_STEP_NUM_TASKS", "6"),
        ("SLURM_STEP_NODELIST", "gpu[007-009,12],login"),
        ("SLURM_JOB_ID", "123456"),
    ];
    let place = tcp(&set);
    assert_eq!((place.rank, place.size, place.address.as_str()), (5, 6, "gpu007"));
    assert!(SLURM_PORTS.contains(&u64::from(place.port)));
    assert_eq!(place.job, format!("slurm 123456.0 {}", place.port));
    let next = tcp(&[&set[..], &[("SLURM_STEP_ID", "1")]].concat());
    assert_ne!(next.port, place.port);
    assert_eq!(tcp(&[&set[..], &[("MASTER_ADDR", "b")]].concat()).address, "b");
    // Variables of torchrun's kind within a job have nothing of a step, which may be another for each rank.
    let own = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "b")];
    let place = tcp(&[&set[..], &own].concat());
    assert_eq!((place.port, place.job.as_str()), (PORT, " 29500"));
}

#[test]
fn mpirun_within_a_step_of_slurm_is_not_taken_for_the_step() {
    let step = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")];
    let mpi = [("OMPI_COMM_WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_RANK", "2")];
    let both = [&step[..], &mpi].concat();
    assert_eq!(of(&both, false).expect("sound"), Launch::Mpi(4));
    let place = tcp(&[&both[..], &[("MASTER_ADDR", "head")]].concat());
    assert_eq!((place.rank, place.size), (2, 4));
    assert_eq!(of(&step, false).expect("sound"), Launch::Alone);
}

#[test]
fn the_place_on_a_machine_is_that_of_the_launcher() {
    let told = |set: &[&[(&str, &str)]], has_mpi: bool| {
        let set = set.concat();
        of(&set, has_mpi).expect("sound").local_rank_of(&reading(&set))
    };
    let place = |set: &[&[(&str, &str)]], has_mpi| told(set, has_mpi).expect("a number");
    let own = [("RANK", "3"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "a")];
    let torchrun = [("LOCAL_RANK", " 1 ")];
    let open = [
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_RANK", "3"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
    ];
    let intel = [("PMI_SIZE", "4"), ("PMI_RANK", "3"), ("MPI_LOCALRANKID", "5")];
    let slurm = [
        ("SLURM_PROCID", "3"),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_STEP_NODELIST", "a"),
        ("SLURM_LOCALID", "7"),
    ];
    let script = [("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_LOCALID", "0")];
    assert_eq!(place(&[&own], false), None);
    assert_eq!(place(&[&own, &torchrun, &open, &slurm], false), Some(1));
    assert_eq!(place(&[&open, &torchrun], true), Some(1));
    assert_eq!(place(&[&open, &slurm], true), Some(2));
    assert_eq!(place(&[&intel, &slurm], true), Some(5));
    assert_eq!(place(&[&slurm], false), Some(7));
    assert_eq!(place(&[&own, &slurm], false), Some(7));
    // Neither the script that starts ranks nor an agent of theirs is one of them.
    assert_eq!(place(&[&own, &script], false), None);
    assert_eq!(place(&[&open, &script], true), Some(2));
    // Ranks of `--ranks` and one process alone have no use for what they inherit.
    assert_eq!(place(&[&own, &torchrun, &[(CHILD, "1")]], false), None);
    assert_eq!(place(&[&torchrun], false), None);
    for (name, set) in [
        ("LOCAL_RANK=x", &[&own[..], &[("LOCAL_RANK", "x")]][..]),
        ("LOCAL_RANK=", &[&own, &[("LOCAL_RANK", "")]]),
        ("LOCAL_RANK=-1", &[&own, &[("LOCAL_RANK", "-1")]]),
        ("SLURM_LOCALID=x", &[&slurm[..3], &[("SLURM_LOCALID", "x")]]),
    ] {
        let error = told(set, false).expect_err(name).to_string();
        assert!(error.starts_with(&format!("{name} is not a number: set ")), "{error}");
    }
}

#[test]
fn the_first_node_of_a_list_is_found() {
    for (list, first) in [
        ("one", Some("one")),
        ("a1,a2", Some("a1")),
        ("n[1-3]", Some("n1")),
        ("n[04,7-9]-ib,m1", Some("n04-ib")),
        ("n[1-2]x[3-4]", None),
        ("n[", None),
        ("", None),
    ] {
        assert_eq!(first_node(list).as_deref(), first, "{list}");
    }
}
