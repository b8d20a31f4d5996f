//! The views of a run through the binary: the page of `watch` in a browser, and `fit` on a terminal that
//! is quit, killed, hung up and suspended.

mod terminal;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::support::files::{demonstration, json_so_far};
use crate::support::processes::wait_until;
use crate::support::{
    Workshop, fail_with, finished, last_json, longdraft, require_words, stderr, succeed, succeeded,
};

/// A `watch` that runs until it is dropped.
struct Watch {
    child: Child,
    address: String,
}

impl Watch {
    fn start(runs: &[&str]) -> Self {
        let mut child = longdraft(&[&["watch", "--json"][..], runs].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let mut line = String::new();
        let out = child.stdout.take().expect("piped");
        BufReader::new(out).read_line(&mut line).expect("an address");
        let address = last_json(&line)["address"].as_str().expect("an address").to_owned();
        assert!(address.starts_with("http://127.0.0.1:"), "{address}");
        Self { child, address }
    }

    fn host(&self) -> &str {
        self.address.trim_start_matches("http://").trim_end_matches('/')
    }

    /// Status, head and body of a path, asked for with a host.
    fn ask(&self, path: &str, host: &str) -> (u16, String, String) {
        ask(self.host(), path, host)
    }

    #[track_caller]
    fn page(&self, path: &str) -> String {
        let (status, _, body) = self.ask(path, self.host());
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// The page as soon as it shows what was written: it may be half a second old.
    #[track_caller]
    fn page_when(&self, shows: impl Fn(&str) -> bool) -> String {
        let mut page = String::new();
        wait_until("the page", || {
            page = self.page("/");
            shows(&page)
        });
        page
    }
}

/// What a server answers.
fn ask(server: &str, path: &str, host: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(server).expect("connected");
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("asked");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("answered");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.expect("a status"), head.to_owned(), body.to_owned())
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
    std::fs::write(path, text).expect("write");
}

fn step(step: u64) -> String {
    let record = json!({
        "step": step, "tokens": 512 * step, "loss": 8.0 / (step as f64).sqrt(), "tokens_per_second": 800.0,
        "simulated_acceptance_length": 1.0 + step as f64 / 100.0, "top1_by_delay": [0.4, 0.3, 0.2],
    });
    format!("{record}\n")
}

/// A fit that answers prompts, with text of anybody in it.
fn fit_in_answers(folder: &Path) {
    let range = json!({ "low": 1.0, "middle": 1.2, "high": 1.5 });
    let plan = json!({
        "answering": 900.0, "training": 1800.0, "proof": 300.0, "tau": range, "speed_up": range,
    });
    let state = json!({ "phase": "answers", "rounds": [{ "plan": plan }] });
    write(&folder.join("fit.json"), &state.to_string());
    let at =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let at = at.as_secs_f64() - 10.0;
    let progress = |second: u64| {
        json!({
            "at": at + second as f64, "memory_mib": 812, "event": "progress", "what": "prompts",
            "done": 30 + 2 * second, "all": 400, "tokens": 700 * second, "at_most": 700,
        })
    };
    let tokens = json!([
        { "text": "Take <b>two</b> eggs" }, { "text": " and two spoons", "proposed_by": "lookup" },
        { "text": " of </pre><script>alert(1)</script> sugar." },
    ]);
    let lines = [
        json!({ "at": at, "event": "phase", "phase": "measure", "round": 1 }),
        json!({ "at": at + 1.0, "event": "phase", "phase": "answers", "round": 1 }),
        progress(2),
        progress(5),
        progress(9),
        json!({ "at": at + 9.5, "event": "answer", "prompt": "How are pancakes <i>made</i>?", "tokens": tokens }),
    ];
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    write(&folder.join("events.jsonl"), &format!("{text}{{\"at\": 1, \"ev"));
}

#[test]
fn a_page_shows_a_run_as_it_goes_and_is_its_report_in_the_end() {
    let shop = Workshop::new();
    let run = shop.path("a \"run\" <img src=x>");
    std::fs::create_dir_all(&run).expect("folder");
    let watch = Watch::start(&[&run]);
    let page = watch.page("/");
    assert!(page.contains("Nothing has begun yet") && !page.contains("<img"), "{page}");

    fit_in_answers(Path::new(&run));
    let page = watch.page_when(|page| page.contains("of 400 prompts"));
    for part in
        ["The target answers prompts, about", "of 400 prompts", "found by prompt lookup", "812 MiB"]
    {
        assert!(page.contains(part), "{part} not in {page}");
    }
    // What anybody wrote is text, and one script runs.
    assert_eq!(
        (page.matches("<script").count(), page.matches("alert(1)").count()),
        (1, 1),
        "{page}"
    );
    assert!(page.contains("&lt;b&gt;two") && page.contains("&lt;i&gt;made"), "{page}");
    assert!(!page.contains("<b>two") && !page.contains("<i>made"), "{page}");

    let folder = Path::new(&run);
    let state = std::fs::read_to_string(folder.join("fit.json")).expect("state");
    write(&folder.join("fit.json"), &state.replace("answers", "training"));
    let steps: String = (1..40).map(step).collect();
    write(&folder.join("training-1/metrics.jsonl"), &format!("{steps}{{\"step\": 40, \"tok"));
    let page = watch.page_when(|page| page.contains("The draft is trained"));
    require_words(&page, &["<figure", "Simulated length"]);

    write(&folder.join("fit.json"), &state.replace("answers", "finished"));
    let page = watch.page_when(|page| !page.contains("class=\"card live\""));
    assert!(page.contains("Training of"), "{page}");
    // The same that `report` writes, but for what asks for more.
    let report = shop.path("report.html");
    succeed(&["report", &run, "--output", &report]);
    let report = std::fs::read_to_string(report).expect("report");
    assert_eq!(page.replace("; connect-src 'self'", "").replace(" data-live", ""), report);
}

#[test]
fn pages_are_for_this_machine_and_only_of_the_named_runs() {
    let shop = Workshop::new();
    let (one, two) = (shop.path("one"), shop.path("two"));
    fit_in_answers(Path::new(&one));
    let steps: String = (1..9).map(step).collect();
    write(&Path::new(&two).join("metrics.jsonl"), &steps);
    let watch = Watch::start(&[&one, &two]);
    let page = watch.page("/");
    for part in [
        "2 runs compared",
        "href=\"/run/1\"",
        "one: The target answers",
        "two: The draft is trained",
    ] {
        assert!(page.contains(part), "{part} not in {page}");
    }
    assert!(watch.page("/run/1").contains("of 400 prompts"));
    assert!(!watch.page("/run/2").contains("of 400 prompts"));
    for path in ["/run/3", "/run/0", "/one/fit.json", "/../../etc/passwd", "/run/1/../../fit.json"]
    {
        assert_eq!(watch.ask(path, watch.host()).0, 404, "{path}");
    }
    for host in ["evil.example", "127.0.0.1.evil.example", "evil.example:80"] {
        let (status, _, body) = watch.ask("/", host);
        assert_eq!(status, 403, "{host}");
        assert!(!body.contains("runs compared"), "{body}");
    }
    let (_, head, _) = watch.ask("/", "localhost");
    let head = head.to_ascii_lowercase();
    assert!(head.contains("content-security-policy: default-src 'none'"), "{head}");
    assert!(head.contains("cache-control: no-store"), "{head}");
    let file = Path::new(&one).join("fit.json").display().to_string();
    fail_with(&["watch", &one, &file], 2, &["fit.json: this is no directory"]);
}

/// Who watches may come before the run.
#[test]
fn a_run_that_has_no_folder_yet_is_waited_for() {
    let shop = Workshop::new();
    let run = shop.path("later");
    let watch = Watch::start(&[&run]);
    let page = watch.page("/");
    require_words(&page, &["waiting for ", "later, which is not there yet"]);
    fit_in_answers(Path::new(&run));
    let page = watch.page_when(|page| page.contains("of 400 prompts"));
    assert!(!page.contains("waiting for "), "{page}");
}

#[test]
fn a_browser_shows_the_page_and_what_is_added() {
    let Some(browser) = browser() else {
        eprintln!("skipped: there is no Chromium on this machine");
        return;
    };
    let shop = Workshop::new();
    let run = shop.path("run");
    fit_in_answers(Path::new(&run));
    let watch = Watch::start(&[&run]);
    let events = Path::new(&run).join("events.jsonl");
    let server = watch.host().to_owned();
    // After the browser has the page, something happens.
    let address = in_between(server.clone(), move || {
        let mut text = std::fs::read_to_string(&events).expect("events");
        text.truncate(text.rfind('\n').expect("lines") + 1);
        let tokens = json!([{ "text": "A later answer." }]);
        let line = json!({ "at": 4e9, "event": "answer", "prompt": "p", "tokens": tokens });
        write(&events, &format!("{text}{line}\n"));
        wait_until("the page", || ask(&server, "/", &server).2.contains("A later answer."));
    });
    let output = Command::new(&browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"])
        .arg(format!("--user-data-dir={}", shop.path("profile")))
        .args(["--virtual-time-budget=15000", "--dump-dom", &address])
        .output()
        .expect("a browser");
    let (page, console) = (String::from_utf8_lossy(&output.stdout), stderr(&output));
    assert!(!console.contains("CONSOLE"), "{console}");
    assert!(page.contains("of 400 prompts"), "{page}");
    assert!(page.contains("A later answer."), "the page does not follow");
}

/// Hands requests on to a server; before the second one for its page something happens.
fn in_between(server: String, happens: impl FnOnce() + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}/", listener.local_addr().expect("an address"));
    let hand_on = move || {
        let (mut pages, mut happens) = (0, Some(happens));
        for client in listener.incoming() {
            let mut client = client.expect("a client");
            let (mut request, mut block) = (Vec::new(), [0; 4096]);
            while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                match client.read(&mut block) {
                    Ok(count) if count > 0 => request.extend(&block[..count]),
                    _ => break,
                }
            }
            let request = String::from_utf8_lossy(&request).replace("keep-alive", "close");
            pages += usize::from(request.starts_with("GET / "));
            if let Some(happens) = happens.take_if(|_| pages > 1) {
                happens();
            }
            let Ok(mut upstream) = TcpStream::connect(&server) else { return };
            let _ = upstream.write_all(request.as_bytes());
            let _ = std::io::copy(&mut upstream, &mut client);
        }
    };
    std::thread::spawn(hand_on);
    address
}

fn browser() -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    let folders: Vec<PathBuf> = std::env::split_paths(&paths).collect();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let found = names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    found.into_iter().find(|path| path.is_file())
}

fn phase(output: &Path) -> String {
    json_so_far(output.join("fit.json"))["phase"].as_str().unwrap_or_default().to_owned()
}

#[cfg(unix)]
#[test]
fn fit_opens_its_page_in_the_browser_of_the_user() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("tempdir");
    let (browser, told) = (folder.path().join("browser"), folder.path().join("told"));
    std::fs::write(&browser, format!("#!/bin/sh\nprintf %s \"$1\" > '{}'\n", told.display()))
        .expect("a program");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&browser, mode).expect("executable");
    let output = folder.path().join("fitted").display().to_string();
    let arguments =
        ["fit", &demonstration(), "--time", "30s", "--plan", "--open", "--output", &output];
    let ended = succeeded(finished(longdraft(&arguments).env("BROWSER", &browser)));
    let address = std::fs::read_to_string(&told).expect("an address");
    assert!(address.starts_with("http://127.0.0.1:"), "{address}");
    assert!(stderr(&ended).contains(&format!("watch at {address}")), "{}", stderr(&ended));
    // Where nothing shows pages, the address is told anyway.
    let ended = finished(longdraft(&arguments).env_remove("BROWSER").env("PATH", ""));
    assert!(ended.status.success() && stderr(&ended).contains("open the address by hand"));
}
