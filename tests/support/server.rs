//! Servers that run on this machine for a test.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};

/// What a connection brought.
pub(crate) struct Asked {
    /// Method and path.
    pub(crate) line: String,
    /// By names in small letters.
    headers: HashMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Asked {
    pub(crate) fn read(reader: &mut BufReader<TcpStream>) -> std::io::Result<Self> {
        let mut first = String::new();
        reader.read_line(&mut first)?;
        let mut headers = HashMap::new();
        loop {
            let mut header = String::new();
            reader.read_line(&mut header)?;
            let Some((name, value)) = header.trim().split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let length = headers.get("content-length").and_then(|length| length.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        let line = first.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
        Ok(Self { line, headers, body })
    }

    pub(crate) fn path(&self) -> &str {
        self.line.split(' ').nth(1).unwrap_or_default()
    }

    pub(crate) fn header(&self, name: &str) -> Option<String> {
        self.headers.get(name).cloned()
    }
}

/// Hands every connection on with the server's address, until the test process ends; returns the address.
pub(crate) fn serve<T>(
    host: &str,
    answer: impl Fn(&str, TcpStream) -> T + Send + 'static,
) -> String {
    let listener = TcpListener::bind((host, 0)).expect("a free port");
    let address = format!("http://{}", listener.local_addr().expect("address"));
    let own = address.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = answer(&own, stream);
        }
    });
    address
}
