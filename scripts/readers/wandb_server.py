"""Stands in for the W&B server that `wandb sync` uploads to, and says whether a whole run arrived.

usage: wandb_server.py PORT_FILE RESULT_FILE (ends once a run is complete)
"""

import gzip
import http.server
import json
import re
import sys
import threading


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    result = {"history": {}, "run": {}}

    def log_message(self, *_):
        pass

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def do_GET(self):
        self.answer({})

    def do_PUT(self):
        self.body()
        self.answer({})

    def do_POST(self):
        body = self.body()
        if self.path.endswith("/graphql"):
            return self.answer({"data": self.graphql(json.loads(body))})
        if self.path.endswith("/file_stream"):
            self.file_stream(json.loads(body))
        self.answer({"exitcode": None, "limits": {}})

    def graphql(self, request):
        query, variables = request["query"], request.get("variables") or {}
        if "upsertBucket" in query:
            self.result["run"] |= {key: value for key, value in variables.items() if value}
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": variables["name"], "displayName": variables["displayName"],
                      "config": "{}", "project": project, "historyLineCount": 0}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            url = f"http://{self.headers['Host']}/upload/"
            files = [{"name": name, "uploadUrl": url + name} for name in variables["files"]]
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": files}}
        if "__type" in query:
            return {name: {"fields": [], "inputFields": []} for name in re.findall(r"(\w+)\s*:\s*__type", query)}
        return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"},
                "serverInfo": {"features": [], "cliVersionInfo": {"max_cli_version": "99.0.0"}}}

    def file_stream(self, message):
        history = (message.get("files") or {}).get("wandb-history.jsonl")
        if history:
            for number, line in enumerate(history["content"], history["offset"]):
                self.result["history"][number] = json.loads(line)
        if message.get("complete"):
            self.result["exitcode"] = message.get("exitcode")
            with open(sys.argv[2], "w") as file:
                json.dump(self.result, file)
            threading.Timer(5, self.server.shutdown).start()


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
with open(sys.argv[1], "w") as file:
    file.write(str(server.server_port))
server.serve_forever()
