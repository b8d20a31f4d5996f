//! Pages for this machine alone: whoever asks must name it as the host, as requests without a key do.

use std::net::TcpListener;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::ServeError;
use crate::routes::{POLICY, names_this_machine};

/// Time for answers that are under way when the server is to end.
const GRACE: Duration = Duration::from_millis(500);
/// Threads that make pages.
const THREADS: usize = 2;

/// What stands at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// HTML.
    pub html: String,
    /// Changes when the page does; letters and digits.
    pub tag: String,
}

/// What is at a path, if anything is.
pub type Pages = dyn FnMut(&str) -> Option<Page> + Send;

type Shared = State<Arc<Mutex<Box<Pages>>>>;

/// Serves pages at `listener` until `asked` says true, on a thread of its own with others beside it;
/// `pages` is called for one request at a time.
///
/// # Errors
/// - the system gives no threads or socket
pub fn serve_pages(
    listener: TcpListener,
    pages: Box<Pages>,
    asked: impl Fn() -> bool + Send + 'static,
) -> Result<std::thread::JoinHandle<std::io::Result<()>>, ServeError> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(THREADS)
        .thread_name("pages")
        .enable_all()
        .build()?;
    let router = router(pages);
    let http = std::thread::Builder::new().name("pages".to_owned()).spawn(move || {
        let cut = AtomicBool::new(false);
        let served = runtime.block_on(crate::listen(listener, router, (asked, GRACE), &cut));
        runtime.shutdown_background();
        served
    })?;
    Ok(http)
}

fn router(pages: Box<Pages>) -> Router {
    Router::new().fallback(answer).with_state(Arc::new(Mutex::new(pages)))
}

async fn answer(State(pages): Shared, request: Request) -> Response {
    if !names_this_machine(request.headers(), None) {
        return told(StatusCode::FORBIDDEN, "the host must be localhost or a loopback address");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return told(StatusCode::METHOD_NOT_ALLOWED, "pages are for GET");
    }
    let path = request.uri().path().to_owned();
    let make = move || {
        let mut pages = pages.lock().unwrap_or_else(PoisonError::into_inner);
        pages(&path)
    };
    match tokio::task::spawn_blocking(make).await {
        Ok(Some(page)) => of_page(page, request.headers()),
        Ok(None) => told(StatusCode::NOT_FOUND, "there is no such page"),
        Err(_) => told(StatusCode::INTERNAL_SERVER_ERROR, "the page could not be made"),
    }
}

fn of_page(page: Page, headers: &HeaderMap) -> Response {
    let tag = format!("\"{}\"", page.tag);
    let known = headers.get(header::IF_NONE_MATCH).and_then(|known| known.to_str().ok());
    let named = [
        (header::ETAG, tag.clone()),
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, POLICY.to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
    ];
    if known == Some(&tag) {
        return (StatusCode::NOT_MODIFIED, named).into_response();
    }
    (named, page.html).into_response()
}

fn told(status: StatusCode, text: &'static str) -> Response {
    let named = [
        (header::CONTENT_TYPE, "text/plain; charset=utf-8"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (status, named, format!("{text}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpStream};
    use std::sync::atomic::Ordering;

    use super::*;

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).expect("connected");
        let request = format!("{request}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("asked");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("answered");
        text
    }

    #[test]
    fn pages_are_for_this_machine_and_for_reading() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let page = |path: &str| {
            assert_ne!(path, "/panics", "as it should");
            let page = Page { html: "<p>é</p>".to_owned(), tag: "1a".to_owned() };
            (path == "/").then_some(page)
        };
        let ended = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&ended);
        let thread = serve_pages(listener, Box::new(page), move || asked.load(Ordering::Relaxed))
            .expect("serves");
        let local = format!("Host: 127.0.0.1:{}", address.port());
        let status = |request: &str| ask(address, request).split(' ').nth(1).map(str::to_owned);
        let of = |request: &str| status(request).unwrap_or_default();
        let found = ask(address, &format!("GET / HTTP/1.1\r\n{local}"));
        assert!(found.starts_with("HTTP/1.1 200") && found.ends_with("<p>é</p>"), "{found}");
        assert!(found.contains("default-src 'none'") && found.contains("no-store"), "{found}");
        assert_eq!(of(&format!("GET / HTTP/1.1\r\n{local}\r\nIf-None-Match: \"1a\"")), "304");
        assert_eq!(of(&format!("GET / HTTP/1.1\r\n{local}\r\nIf-None-Match: \"2\"")), "200");
        assert_eq!(of("GET / HTTP/1.1\r\nHost: evil.example"), "403");
        assert_eq!(of("GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example:80"), "403");
        assert_eq!(of(&format!("POST / HTTP/1.1\r\n{local}\r\nContent-Length: 0")), "405");
        for path in ["/../../etc/passwd", "/%2e%2e/fit.json", "/fit.json"] {
            assert_eq!(of(&format!("GET {path} HTTP/1.1\r\n{local}")), "404", "{path}");
        }
        assert_eq!(of(&format!("GET /panics HTTP/1.1\r\n{local}")), "500");
        assert_eq!(of(&format!("GET / HTTP/1.1\r\n{local}")), "200");
        ended.store(true, Ordering::Relaxed);
        thread.join().expect("no panic").expect("served");
    }
}
