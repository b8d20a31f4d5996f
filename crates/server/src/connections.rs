//! Connections of clients: each ends where no request comes for long, or when the server does.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::serve::Listener;
use axum::{Extension, Router};
use futures_util::future::{Either, select};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::sleep;

/// Time in which the head of the next request must have come. Who is silent for longer, or gone without a word, keeps
/// no connection: there are only so many. Clients and proxies keep theirs for less (Go's for 90 s), so that none of
/// them asks where it is closed at that moment.
pub(crate) const HEAD_WITHIN: Duration = Duration::from_mins(2);

/// Time in which requests that are on their way must have come when the server is to end: others have its grace.
const COMES_WITHIN: Duration = Duration::from_secs(1);

/// Says when the server is to end. Every request carries it.
#[derive(Debug, Clone)]
pub(crate) struct Ending(watch::Receiver<bool>);

impl Ending {
    /// Waits until the server is to end.
    async fn told(mut self) {
        // An error means that nobody can say so any more.
        let _ = self.0.wait_for(|told| *told).await;
    }

    /// Waits until a request that has not wholly come comes too late.
    pub(crate) async fn too_late(self) {
        self.told().await;
        sleep(COMES_WITHIN).await;
    }
}

/// Serves connections until `told` says true, and then those that are open until all is answered that has come. Each
/// ends where the head of a request does not come within `head_within`.
pub(crate) async fn serve<L: Listener<Io = TcpStream>>(
    mut listener: L,
    router: Router,
    told: watch::Receiver<bool>,
    head_within: Duration,
) {
    let ending = Ending(told);
    let router = router.layer(Extension(ending.clone()));
    // Every connection holds a sender.
    let (open, mut closed) = mpsc::channel::<Infallible>(1);
    loop {
        let stream = {
            let (next, ending) = (pin!(listener.accept()), pin!(ending.clone().told()));
            // The end is asked for first: clients may come without a pause.
            match select(ending, next).await {
                Either::Left(_) => break,
                Either::Right(((stream, _), _)) => stream,
            }
        };
        let (router, ending, open) = (router.clone(), ending.clone(), open.clone());
        tokio::spawn(async move {
            serve_one(stream, router, ending, head_within).await;
            drop(open);
        });
    }
    drop((listener, open));
    while closed.recv().await.is_some() {}
}

/// Answers the requests of a connection.
async fn serve_one(stream: TcpStream, router: Router, ending: Ending, head_within: Duration) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_within);
    let has_asked = Arc::new(AtomicBool::new(false));
    let (service, asks) = (TowerToHyperService::new(router), Arc::clone(&has_asked));
    let service = service_fn(move |request: Request<Incoming>| {
        asks.store(true, Ordering::Relaxed);
        service.call(request)
    });
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    if let Either::Left(_) = select(connection.as_mut(), pin!(ending.told())).await {
        return;
    }
    // Ends a connection that waits for another request, but not one whose first head has come in part.
    connection.as_mut().graceful_shutdown();
    if let Either::Left(_) = select(connection.as_mut(), pin!(sleep(COMES_WITHIN))).await {
        return;
    }
    if has_asked.load(Ordering::Relaxed) {
        // What goes wrong with a connection concerns its client alone.
        let _ = connection.await;
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;
    use crate::answer::tests::{app_of, settings};

    const LONG: Duration = Duration::from_secs(20);

    /// The connection of a client that says `text`.
    async fn said(address: std::net::SocketAddr, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        stream.write_all(text.as_bytes()).await.expect("said");
        stream
    }

    /// What a client hears until its connection ends.
    async fn rest(mut stream: TcpStream) -> String {
        let mut heard = Vec::new();
        let end = timeout(LONG, stream.read_to_end(&mut heard)).await;
        end.expect("the connection stays open").expect("heard");
        String::from_utf8(heard).expect("text")
    }

    /// What a client hears that says `text` and then nothing, until its connection ends.
    async fn heard(address: std::net::SocketAddr, text: &str) -> String {
        rest(said(address, text).await).await
    }

    /// Else clients that are silent or gone take all connections that the system gives, and nobody is answered.
    #[test]
    fn a_silent_connection_ends_and_a_slow_answer_does_not() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.block_on(async {
            let slow = || async {
                sleep(Duration::from_secs(1)).await;
                "done"
            };
            let router = Router::new().route("/", get(slow));
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            let (tell, told) = watch::channel(false);
            let server = tokio::spawn(serve(listener, router, told, Duration::from_millis(200)));
            assert_eq!(heard(address, "").await, "");
            assert_eq!(heard(address, "GET / HTTP/1.1\r\nHost: a").await, "");
            // The answer takes longer than a head may, and its connection is kept for another one.
            let answer = heard(address, "GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("done"), "{answer}");
            assert!(!answer.contains("connection: close"), "{answer}");
            tell.send(true).expect("told");
            server.await.expect("ended");
        });
    }

    /// Else a client that stops in the middle of a request keeps the server for the whole grace.
    #[test]
    fn a_request_that_has_not_wholly_come_does_not_hold_up_the_end() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        runtime.block_on(async {
            let (begin, mut begun) = mpsc::channel(1);
            let slow = move || async move {
                begin.send(()).await.expect("it is awaited");
                sleep(3 * COMES_WITHIN).await;
                "done"
            };
            let app = app_of(settings(), None, crate::channel().1.line);
            let router = crate::routes::router(app).expect("paths").route("/slow", get(slow));
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            let (tell, told) = watch::channel(false);
            let server = tokio::spawn(serve(listener, router, told, HEAD_WITHIN));
            // Connections are taken in their order.
            let mut head = said(address, "GET / HTTP/1.1\r\nHost").await;
            let answer = said(address, "GET /slow HTTP/1.1\r\nHost: a\r\n\r\n").await;
            begun.recv().await.expect("it is answered");
            let text = "POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n\
                        Content-Length: 99\r\nExpect: 100-continue\r\n\r\n{\"prompt\"";
            let mut body = said(address, text).await;
            // Said when the body begins to be read.
            let mut goes_on = [0_u8; "HTTP/1.1 100 Continue\r\n\r\n".len()];
            body.read_exact(&mut goes_on).await.expect("heard");
            tell.send(true).expect("told");
            let refused = rest(body).await;
            assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
            assert!(refused.contains("shutting down"), "{refused}");
            // It may be reset.
            let mut nothing = Vec::new();
            let end = timeout(LONG, head.read_to_end(&mut nothing)).await;
            assert!(end.is_ok() && nothing.is_empty(), "the connection stays open");
            let answer = rest(answer).await;
            assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("done"), "{answer}");
            timeout(LONG, server).await.expect("the server goes on").expect("no panic");
        });
    }
}
