// The draft of a configuration waits in the tab's storage until it is saved, so a reload or a new sign-in does not lose it.
const STORE = `rft-studio-draft ${document.body.dataset.identity} ${location.search}`;
const byId = (id) => document.getElementById(id);
const area = () => byId("config-text");
const redraft = () => area().dispatchEvent(new CustomEvent("redraft"));
let shown, base; // digests of the file: as the page has it, and as it was when the draft was begun

const keep = () => sessionStorage.setItem(STORE, JSON.stringify({ text: area().value, base }));
document.addEventListener("input", (event) => {
  if (event.target === area()) keep();
});
// What is typed while an answer is under way stays: the answer has the text as it was sent.
const sent = new WeakMap();
let answer = null;
document.addEventListener("htmx:beforeRequest", ({ detail }) => {
  if (area()) sent.set(detail.xhr, { text: area().value, from: detail.elt });
});
document.addEventListener("htmx:beforeSwap", ({ detail }) => {
  answer = sent.get(detail.xhr);
  const typing = document.activeElement;
  if (answer?.from !== area() || typing.name !== "value" || typing.value === typing.defaultValue) return;
  detail.shouldSwap = false;
  typing.addEventListener("blur", () => setTimeout(redraft), { once: true });
});
document.addEventListener("htmx:oobBeforeSwap", ({ detail }) => {
  if (detail.target !== area() || !answer || area().value === answer.text) return;
  detail.shouldSwap = false;
  const { from } = answer;
  setTimeout(() => (from.isConnected && from.name === "value" ? htmx.trigger(from, "change") : redraft()));
});
document.addEventListener("htmx:afterSettle", ({ target }) => {
  if (!area() || target.closest("#config-runs")) return; // runs come every two seconds, and say nothing of the draft
  const isUnsaved = document.querySelector("[data-unsaved]") !== null;
  if (!isUnsaved || byId("config-digest").value !== shown) base = shown = byId("config-digest").value; // saved
  byId("config-newer").hidden = base === shown;
  isUnsaved ? keep() : sessionStorage.removeItem(STORE);
});
document.addEventListener("click", ({ target }) => {
  if (target.id !== "config-discard") return;
  sessionStorage.removeItem(STORE);
  location.reload();
});
// After htmx has found the page.
document.addEventListener("DOMContentLoaded", () => {
  base = shown = byId("config-digest")?.value;
  const draft = area() && JSON.parse(sessionStorage.getItem(STORE));
  if (!draft) return;
  base = draft.base;
  area().value = draft.text;
  byId("config-newer").hidden = base === shown;
  area().dispatchEvent(new Event("input", { bubbles: true }));
});
