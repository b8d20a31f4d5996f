//! MLflow over its REST API, from a thread of its own: training hands over its rows and goes on.

mod client;
mod worker;

use std::sync::mpsc::{
    Receiver, RecvTimeoutError, SyncSender, TrySendError, channel, sync_channel,
};
use std::thread::JoinHandle;
use std::time::Duration;

use super::error::{Result, TrackerError};
use super::{Moment, Outcome, Row, Run, Tracker};
use client::Client;
use worker::{Message, work};

/// Steps that may wait for a slow server.
const QUEUE: usize = 10_000;

/// What a server gets at the end to take the last rows.
const FAREWELL: Duration = Duration::from_secs(30);

/// Sends rows to a server.
pub struct Mlflow {
    messages: SyncSender<Message>,
    worker: Option<JoinHandle<Result<String>>>,
    /// Closed when the worker ends.
    ended: Receiver<()>,
}

impl Mlflow {
    /// Starts the thread that speaks to the server; whether it answers shows later.
    ///
    /// # Errors
    /// - no address, or one that is not HTTP
    pub fn open(run: &Run) -> Result<Self> {
        let uri = run.tracking.mlflow.uri.as_deref();
        let uri = uri.or(run.environment.get("MLFLOW_TRACKING_URI")).ok_or_else(|| {
            TrackerError::Setup(
                "no server is named: set tracking.mlflow.uri or MLFLOW_TRACKING_URI".to_owned(),
            )
        })?;
        let client = Client::new(uri, &run.environment)?;
        let (messages, received) = sync_channel(QUEUE);
        let (alive, ended) = channel();
        let run = run.clone();
        let worker = std::thread::Builder::new().name("mlflow".to_owned()).spawn(move || {
            let _alive = alive;
            work(&client, &run, &received)
        });
        let worker = worker.map_err(|error| {
            TrackerError::Setup(format!("no thread can be started for it: {error}"))
        })?;
        Ok(Self { messages, worker: Some(worker), ended })
    }

    fn send(&mut self, message: Message) -> Result<()> {
        match self.messages.try_send(message) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => Err(TrackerError::Setup(format!(
                "the server is too slow: {QUEUE} steps wait; raise train.log_every"
            ))),
            // The worker ends early only with an error.
            Err(TrySendError::Disconnected(_)) => Err(self.join().err().unwrap_or_else(broken)),
        }
    }

    fn join(&mut self) -> Result<String> {
        let worker = self.worker.take().ok_or_else(broken)?;
        worker.join().unwrap_or_else(|_| Err(broken()))
    }
}

fn broken() -> TrackerError {
    TrackerError::Setup("its thread ended".to_owned())
}

impl Tracker for Mlflow {
    fn log(&mut self, row: &Row) -> Result<()> {
        self.send(Message::Row(row.clone()))
    }

    fn finish(&mut self, outcome: Outcome, time: Moment) -> Result<Option<String>> {
        self.send(Message::Finish(outcome, time))?;
        match self.ended.recv_timeout(FAREWELL) {
            Err(RecvTimeoutError::Timeout) => Err(TrackerError::Setup(format!(
                "the server did not take the last rows in {} s",
                FAREWELL.as_secs()
            ))),
            _ => Ok(Some(self.join()?)),
        }
    }
}

#[cfg(test)]
mod tests;
