//! Requests on their way in: no more at a time than may be answered or wait, each for a bounded time, which is short
//! when the server ends.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use futures_util::future::{Either, pending, select};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use crate::app::App;
use crate::connections::Ending;
use crate::error::{ApiError, Result};
use crate::request::body_of;

/// Time in which a body must have come: who sends slowly keeps others out.
const READ_WITHIN: Duration = Duration::from_mins(1);

/// A request that was let in before its body was read.
pub(crate) struct Entry {
    /// Its body, which is JSON by its type.
    pub(crate) body: Bytes,
    /// Its place among those that are read; given back when it is known what they ask for.
    pub(crate) place: OwnedSemaphorePermit,
}

impl FromRequest<Arc<App>> for Entry {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self> {
        let place = app.enter()?;
        let headers = request.headers().clone();
        let ending = request.extensions().get::<Ending>().cloned();
        let too_late = async {
            match ending {
                Some(ending) => ending.too_late().await,
                None => pending().await,
            }
        };
        let read = timeout(READ_WITHIN, Bytes::from_request(request, app));
        let body = match select(pin!(read), pin!(too_late)).await {
            Either::Left((body, _)) => body,
            Either::Right(_) => return Err(ApiError::ending()),
        };
        let body = body.map_err(|_| {
            let message = format!("the body did not come within {} s", READ_WITHIN.as_secs());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
        })?;
        Ok(Self { body: body_of(&headers, body)?, place })
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::header;

    use super::*;
    use crate::answer::tests::{app_of, settings};

    #[test]
    fn no_body_is_read_where_too_many_are() {
        let app = app_of(settings(), None, crate::channel().1.line);
        let runtime = tokio::runtime::Runtime::new().expect("runtime");
        let enter = || {
            let request = axum::http::Request::builder();
            let request = request.header(header::CONTENT_TYPE, "application/json");
            let request = request.body(Body::from("{}")).expect("a request");
            runtime.block_on(Entry::from_request(request, &app))
        };
        let mut entries = Vec::new();
        let refused = loop {
            match enter() {
                Ok(entry) => entries.push(entry),
                Err(error) => break error,
            }
            assert!(entries.len() < 100, "there is no end");
        };
        assert_eq!(refused.to_json()["error"]["code"], "rate_limit_exceeded");
        // A place is taken until the work on the request is done, wherever its client is.
        let Some(Entry { place, .. }) = entries.pop() else { panic!("none was let in") };
        let work = |app: &App| Ok(app.enter().is_err());
        assert_eq!(runtime.block_on(app.aside(place, work)), Ok(true));
        assert!(app.enter().is_ok());
    }
}
