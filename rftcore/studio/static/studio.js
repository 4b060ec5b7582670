// The scripts of all pages. Each module has one task; pages are complete without a build step.
import "./keys.js";
import "./live.js";
import "./charts.js";
import "./forms.js";
import "./queue.js";
import "./ranking.js";
import "./spans.js";
import "./config.js";
import { problem } from "./problems.js";

// htmx: every request carries the session's token and identity; answers of the guards are plain text, and become a message.
document.addEventListener("htmx:configRequest", (event) => {
  event.detail.headers["X-Studio-Token"] = document.body.dataset.token;
  event.detail.headers["X-Studio-Identity"] = document.body.dataset.identity;
});
document.addEventListener("htmx:beforeSwap", (event) => {
  const type = event.detail.xhr.getResponseHeader("content-type") || "";
  if (event.detail.xhr.status >= 400 && type.startsWith("text/plain")) {
    event.detail.shouldSwap = false;
    problem(event.detail.xhr.responseText);
  }
});
document.addEventListener("htmx:sendError", () => problem(document.body.dataset.offline));
