// The draft of a configuration waits in the tab's storage until it is saved, so a reload or a new sign-in does not lose it.
const STORE = `rft-studio-draft ${document.body.dataset.identity} ${location.search}`;
const area = () => document.getElementById("config-text");

document.addEventListener("input", (event) => {
  if (event.target === area()) sessionStorage.setItem(STORE, event.target.value);
});
document.addEventListener("htmx:afterSettle", () => {
  if (!area()) return;
  if (document.querySelector("[data-unsaved]")) sessionStorage.setItem(STORE, area().value);
  else sessionStorage.removeItem(STORE);
});
// After htmx has found the page.
document.addEventListener("DOMContentLoaded", () => {
  const draft = area() && sessionStorage.getItem(STORE);
  if (draft === null) return;
  area().value = draft;
  area().dispatchEvent(new Event("input", { bubbles: true }));
});
