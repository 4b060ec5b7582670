"""A small HTTP server that speaks the protocol of chat completions and answers with a real model, by transformers.

A request may carry `template`: its text is forced, and the model chooses a digit from 1 to 5 for every `#` in it, which is how a model that
was never trained can answer in a form that a program reads.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class ModelServer:
    """Serves the model in a folder on a free port until `close`.

    Args:
        refuses: requests whose text contains this are answered with status 500.

    Attributes:
        answers: what the model said, in order.
    """

    def __init__(self, folder: Path, *, refuses: str | None = None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.answers: list[str] = []
        self._refuses = refuses
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = outer.answer(body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body for a request."""
        messages = body["messages"]
        if self._refuses is not None and any(self._refuses in message["content"] for message in messages):
            return 500, {"error": {"message": "the server is out of order"}}
        # One request at a time: torch uses all processors anyway.
        with self._lock:
            prompt = "\n".join(message["content"] for message in messages)[-100:]
            text = self._filled(prompt, body["template"]) if "template" in body else self._continued(prompt, body)
            self.answers.append(text)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        tokens = {"prompt_tokens": len(prompt), "completion_tokens": len(text), "total_tokens": len(prompt) + len(text)}
        return 200, {"id": "1", "object": "chat.completion", "model": "tiny", "choices": [choice], "usage": tokens}

    def _continued(self, prompt: str, body: dict[str, Any]) -> str:
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = self.model.generate(ids, max_new_tokens=body.get("max_tokens", 8), do_sample=False)
        return str(self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))

    def _filled(self, prompt: str, template: str) -> str:
        import torch

        digits = self.tokenizer.convert_tokens_to_ids(list("12345"))
        text = ""
        for part in template.split("#")[:-1]:
            text += part
            ids = self.tokenizer(prompt + text[-40:], return_tensors="pt")["input_ids"]
            with torch.no_grad():
                text += "12345"[int(self.model(ids).logits[0, -1, digits].argmax())]
        return text + template.split("#")[-1]

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
