//! Connections of clients: each ends where no request comes for long, or when the server does.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use futures_util::future::{Either, select};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};

/// Time in which the head of the next request must have come. Who is silent for longer, or gone without a word, keeps
/// no connection: there are only so many. Clients and proxies keep theirs for less (Go's for 90 s), so that none of
/// them asks where it is closed at that moment.
pub(crate) const HEAD_WITHIN: Duration = Duration::from_mins(2);

/// Serves connections until `told` says true, and then those that are open until all is answered. Each ends where
/// the head of a request does not come within `head_within`.
pub(crate) async fn serve<L: Listener<Io = TcpStream>>(
    mut listener: L,
    router: Router,
    told: watch::Receiver<bool>,
    head_within: Duration,
) {
    // Every connection holds a sender.
    let (open, mut closed) = mpsc::channel::<Infallible>(1);
    loop {
        let stream = {
            let (next, ending) = (pin!(listener.accept()), pin!(is_told(told.clone())));
            // The end is asked for first: clients may come without a pause.
            match select(ending, next).await {
                Either::Left(_) => break,
                Either::Right(((stream, _), _)) => stream,
            }
        };
        let (router, told, open) = (router.clone(), told.clone(), open.clone());
        tokio::spawn(async move {
            serve_one(stream, router, told, head_within).await;
            drop(open);
        });
    }
    drop((listener, open));
    while closed.recv().await.is_some() {}
}

/// Answers the requests of a connection.
async fn serve_one(
    stream: TcpStream,
    router: Router,
    told: watch::Receiver<bool>,
    head_within: Duration,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_within);
    let service = TowerToHyperService::new(router);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    let ending = pin!(is_told(told));
    if let Either::Left(_) = select(connection.as_mut(), ending).await {
        return;
    }
    connection.as_mut().graceful_shutdown();
    // What goes wrong with a connection concerns its client alone.
    let _ = connection.await;
}

/// Waits until the server is to end.
async fn is_told(mut told: watch::Receiver<bool>) {
    // An error means that nobody can say so any more.
    let _ = told.wait_for(|told| *told).await;
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::time::{sleep, timeout};

    use super::*;

    /// What a client hears that says `text` and then nothing, until its connection ends.
    async fn heard(address: std::net::SocketAddr, text: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        stream.write_all(text.as_bytes()).await.expect("said");
        let mut heard = Vec::new();
        let end = timeout(Duration::from_secs(20), stream.read_to_end(&mut heard)).await;
        end.expect("the connection stays open").expect("heard");
        String::from_utf8(heard).expect("text")
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
}
