//! `events.jsonl`: what a long command tells as it goes, a line an event.
//!
//! It holds only what no other file of the run says: when a phase began, how far it has come, and the
//! answer that is being written. Losses stand in `metrics.jsonl`, what is done in the state of the
//! command. Work goes on without it, so that a disk which is full for it alone stops none: only the time of a call that was
//! killed is counted by it.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use longdraft_train::memory::resident_bytes;
use serde::{Deserialize, Serialize};

use crate::decode::SampleToken;

/// Name of the file in a run's folder.
pub const EVENTS_FILE: &str = "events.jsonl";

/// Seconds between two events of a kind: few where the work is long, so that the file stays small.
const SOON: f64 = 1.0;
const LATE: f64 = 10.0;
/// Share of the time so far after which the next event is due.
const SHARE: f64 = 1.0 / 400.0;
/// Largest line that is read, in bytes: no event is longer.
const LONGEST: usize = 1 << 16;
/// Letters of an answer and of its prompt that are told.
const ANSWER_LETTERS: usize = 600;
const PROMPT_LETTERS: usize = 240;

/// The phases of a fit in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FitPhase {
    /// The machine is measured.
    Measure,
    /// The target answers prompts.
    Answers,
    /// The draft is trained.
    Training,
    /// Held-out prompts prove the draft.
    Proof,
    /// The draft is handed over.
    Delivery,
    /// There is nothing more to do.
    Finished,
}

impl FitPhase {
    /// Those that have work.
    pub const WITH_WORK: [Self; 5] =
        [Self::Measure, Self::Answers, Self::Training, Self::Proof, Self::Delivery];
}

impl fmt::Display for FitPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A phase of a round begins, or goes on.
    Phase {
        /// One of [`FitPhase::WITH_WORK`].
        phase: FitPhase,
        /// From 1.
        round: usize,
    },
    /// How far the work of a phase has come.
    Progress(Advance),
    /// The answer that is being written.
    Answer(Answer),
    /// The command ends early, and can go on.
    Stopped,
}

/// How far some work has come.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Advance {
    /// What is counted: `prompts`, `steps`.
    pub what: String,
    /// How many are done.
    pub done: usize,
    /// Of how many; 0 where nothing says it.
    pub all: usize,
    /// Tokens so far, if they are counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u64>,
    /// Seconds after which the work ends wherever it stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
}

impl Advance {
    /// What is done of all, from 0 to 1.
    pub fn share(&self) -> f64 {
        (self.done as f64 / self.all.max(1) as f64).clamp(0.0, 1.0)
    }
}

/// The end of an answer, with what proposed its tokens.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// The end of its prompt.
    pub prompt: String,
    /// Its own end.
    pub tokens: Vec<SampleToken>,
}

impl Answer {
    /// Cut to what is shown.
    fn shortened(mut self) -> Self {
        let letters = self.prompt.chars().count();
        self.prompt = self.prompt.chars().skip(letters.saturating_sub(PROMPT_LETTERS)).collect();
        let mut left = ANSWER_LETTERS;
        let mut first = self.tokens.len();
        while let Some(token) = first.checked_sub(1).and_then(|before| self.tokens.get(before)) {
            let letters = token.text.chars().count();
            if letters > left {
                break;
            }
            left -= letters;
            first -= 1;
        }
        self.tokens.drain(..first);
        self
    }
}

/// An event with when it happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Seconds since 1970.
    pub at: f64,
    /// Resident memory of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<f64>,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Writes events; clones write into the same file.
#[derive(Debug, Clone)]
pub struct Events {
    file: Option<Arc<Mutex<File>>>,
    began: Instant,
    /// When progress and answers were told last.
    told: [Option<Instant>; 2],
}

impl Events {
    /// Of a command that tells nobody.
    pub fn none() -> Self {
        Self { file: None, began: Instant::now(), told: [None; 2] }
    }

    /// Goes on after what an earlier call left in a folder.
    ///
    /// # Errors
    /// - the file cannot be opened. It is no reason to stop: the command's own files will say what is
    ///   wrong with the folder
    pub fn open(folder: &Path) -> std::io::Result<Self> {
        let path = folder.join(EVENTS_FILE);
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        end_line(&mut file)?;
        Ok(Self { file: Some(Arc::new(Mutex::new(file))), ..Self::none() })
    }

    /// Writes an event; one that cannot be written is lost.
    fn write(&self, event: Event) {
        let Some(file) = &self.file else { return };
        let memory_mib = resident_bytes().map(|bytes| (bytes >> 20) as f64);
        let line = Line { at: now(), memory_mib, event };
        let Ok(text) = serde_json::to_string(&line) else { return };
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        // One call a line: a kill leaves whole lines, or one torn one, which readers pass over.
        let _ = file.write_all(format!("{text}\n").as_bytes());
    }

    /// A phase begins.
    pub fn phase(&mut self, phase: FitPhase, round: usize) {
        (self.began, self.told) = (Instant::now(), [None; 2]);
        self.write(Event::Phase { phase, round });
    }

    /// Tells how far the work has come, now and then and at its end.
    pub fn progress(&mut self, advance: Advance) {
        let is_due = self.is_due(0);
        if is_due {
            self.told[0] = Some(Instant::now());
        }
        if is_due || advance.done >= advance.all {
            self.write(Event::Progress(advance));
        }
    }

    /// Tells the answer that is being written, now and then; `answer` is asked only then.
    pub fn answer(&mut self, answer: impl FnOnce() -> Option<Answer>) {
        if self.file.is_some()
            && self.is_due(1)
            && let Some(answer) = answer()
        {
            self.told[1] = Some(Instant::now());
            self.write(Event::Answer(answer.shortened()));
        }
    }

    /// The command ends early.
    pub fn stopped(&self) {
        self.write(Event::Stopped);
    }

    fn is_due(&self, kind: usize) -> bool {
        let pause = (SHARE * self.began.elapsed().as_secs_f64()).clamp(SOON, LATE);
        self.told[kind].is_none_or(|told| told.elapsed().as_secs_f64() >= pause)
    }
}

/// Ends a line that a kill tore.
fn end_line(file: &mut File) -> std::io::Result<()> {
    let length = file.seek(SeekFrom::End(0))?;
    if length == 0 {
        return Ok(());
    }
    file.seek(SeekFrom::Start(length - 1))?;
    let mut last = [0];
    file.read_exact(&mut last)?;
    if last[0] == b'\n' { Ok(()) } else { file.write_all(b"\n") }
}

/// Reads a file of events as it grows.
#[derive(Debug, Default)]
pub struct Reader {
    path: PathBuf,
    /// Bytes of whole lines that were read.
    read: u64,
}

impl Reader {
    /// Of a run's folder.
    pub fn of(folder: &Path) -> Self {
        Self { path: folder.join(EVENTS_FILE), read: 0 }
    }

    /// The events that were added since the last call; `true` if the file began anew, so that earlier
    /// ones no longer count. Lines that make no sense are passed over.
    pub fn more(&mut self) -> (Vec<Line>, bool) {
        let Ok(mut file) = File::open(&self.path) else { return (Vec::new(), false) };
        let length = file.metadata().map_or(0, |file| file.len());
        let anew = length < self.read;
        if anew {
            self.read = 0;
        }
        let mut bytes = Vec::new();
        if file.seek(SeekFrom::Start(self.read)).is_err() || file.read_to_end(&mut bytes).is_err() {
            return (Vec::new(), anew);
        }
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.read += whole as u64;
        let lines = bytes[..whole].split(|byte| *byte == b'\n');
        let short = lines.filter(|line| !line.is_empty() && line.len() <= LONGEST);
        (short.filter_map(|line| serde_json::from_slice(line).ok()).collect(), anew)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phases(lines: &[Line]) -> Vec<FitPhase> {
        let mut found = Vec::new();
        for line in lines {
            if let Event::Phase { phase, .. } = line.event {
                found.push(phase);
            }
        }
        found
    }

    #[test]
    fn events_are_read_as_they_are_added_and_torn_lines_are_passed_over() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join(EVENTS_FILE);
        let mut reader = Reader::of(folder.path());
        assert_eq!(reader.more(), (Vec::new(), false));
        let mut events = Events::open(folder.path()).expect("opened");
        events.phase(FitPhase::Answers, 1);
        events.progress(Advance { done: 1, all: 9, ..Advance::default() });
        // Not due yet.
        events.progress(Advance { done: 2, all: 9, ..Advance::default() });
        events.progress(Advance { done: 9, all: 9, ..Advance::default() });
        let (lines, anew) = reader.more();
        assert_eq!((phases(&lines), lines.len(), anew), (vec![FitPhase::Answers], 3, false));
        assert_eq!(reader.more().0, Vec::new());
        let text = std::fs::read_to_string(&path).expect("events");
        std::fs::write(&path, format!("{text}not json\n{{\"at\": 1, \"event\": \"ph"))
            .expect("torn");
        assert_eq!(reader.more().0, Vec::new());
        let mut events = Events::open(folder.path()).expect("opened");
        events.phase(FitPhase::Training, 1);
        assert_eq!(phases(&reader.more().0), [FitPhase::Training]);
        // Written anew.
        std::fs::write(&path, "{\"at\": 1, \"event\": \"stopped\"}\n").expect("another");
        let (lines, anew) = reader.more();
        assert_eq!((lines.len(), anew), (1, true));
    }

    #[test]
    fn long_answers_are_told_by_their_end() {
        let token = |i: usize| SampleToken { text: format!(" {i}"), proposed_by: None };
        let answer = Answer { prompt: "é".repeat(1000), tokens: (0..1000).map(token).collect() };
        let short = answer.shortened();
        assert_eq!(short.prompt.chars().count(), PROMPT_LETTERS);
        assert_eq!(short.tokens.last().map(|token| token.text.as_str()), Some(" 999"));
        let letters: usize = short.tokens.iter().map(|token| token.text.chars().count()).sum();
        assert!(letters <= ANSWER_LETTERS && letters > ANSWER_LETTERS - 10, "{letters}");
    }

    #[test]
    fn a_folder_that_takes_no_events_stops_nothing() {
        let folder = tempfile::tempdir().expect("folder");
        let events = Events::open(&folder.path().join("absent"));
        let mut events = events.unwrap_or_else(|_| Events::none());
        events.phase(FitPhase::Answers, 1);
        events.answer(|| panic!("nobody asks"));
    }

    #[test]
    fn files_name_a_phase_as_people_do() {
        for phase in FitPhase::WITH_WORK.into_iter().chain([FitPhase::Finished]) {
            let event = Event::Phase { phase, round: 2 };
            let text = format!(r#"{{"event":"phase","phase":"{phase}","round":2}}"#);
            assert_eq!(serde_json::to_string(&event).expect("text"), text);
            assert_eq!(serde_json::from_str::<Event>(&text).expect("an event"), event);
        }
        assert!(FitPhase::WITH_WORK.is_sorted() && FitPhase::Delivery < FitPhase::Finished);
    }
}
