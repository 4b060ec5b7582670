// One event stream per tab. An event says only that something may have changed: elements with data-live fetch again what they show.
let stream, hidden;

function open() {
  if (stream || !document.body.dataset.events) return;
  stream = new EventSource(document.body.dataset.events);
  stream.addEventListener("live", () => {
    for (const element of document.querySelectorAll("[data-live]")) element.dispatchEvent(new CustomEvent("live"));
    document.dispatchEvent(new CustomEvent("studio:live"));
  });
}

function close() {
  stream?.close();
  stream = null;
}

// A browser keeps at most six connections to a server, so a tab in the background gives its own back.
document.addEventListener("visibilitychange", () => {
  clearTimeout(hidden);
  if (document.hidden) hidden = setTimeout(close, 5000);
  else open();
});
addEventListener("pagehide", close);
open();

// A page that could not be shown because the database was away.
const reload = document.querySelector("[data-reload]");
if (reload) setTimeout(() => location.reload(), 1000 * Number(reload.dataset.reload));
