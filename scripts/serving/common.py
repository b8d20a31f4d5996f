"""Requests by hand: sockets that may be read slowly, closed early or torn down."""

import http.client
import json
import socket
import struct
import subprocess
import time
import urllib.parse


def generated(binary, target, prompt, tokens):
    """What `generate` says after a prompt, at temperature 0, without a draft."""
    command = [binary, "generate", "--target", target, "--prompt", prompt, "--max-tokens", str(tokens), "--temperature", "0", "--no-draft", "--json"]
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    return json.loads(told.strip().splitlines()[-1])["text"]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def connection(address, timeout=300):
    parts = urllib.parse.urlsplit(address)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)


def post(address, path, body, kind="application/json"):
    """Status and body of an answer; the body may be bytes that are no JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = connection(address)
    try:
        asked.request("POST", path, data, {"content-type": kind})
        answer = asked.getresponse()
        return answer.status, answer.read()
    finally:
        asked.close()


def answers(address, path):
    """Whether a server says yes at a path."""
    asked = connection(address, 5)
    try:
        asked.request("GET", path)
        return asked.getresponse().status == 200
    except OSError:
        return False
    finally:
        asked.close()


class Stream:
    """The events of an answer, one by one."""

    def __init__(self, address, path, body):
        self.connection = connection(address)
        self.connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        self.answer = self.connection.getresponse()
        self.status = self.answer.status

    def events(self, pause=0.0):
        for line in self.answer:
            if pause:
                time.sleep(pause)
            if line.startswith(b"data: "):
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)

    def close(self):
        self.connection.close()

    def tear(self):
        """Ends the connection at once, as the system does for a program that was killed."""
        if self.connection.sock is not None:
            self.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.answer.close()
        self.connection.close()


def text_of(event):
    choice = event["choices"][0] if event.get("choices") else {}
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def metrics(address):
    asked = connection(address)
    asked.request("GET", "/metrics")
    lines = asked.getresponse().read().decode().splitlines()
    asked.close()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def resident(process):
    """Bytes of memory that a process holds."""
    with open(f"/proc/{process}/status", encoding="utf-8") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else float("nan")
