// Keys of buttons and links: data-key="p". They are shown beside the action and under `?`, and do nothing while a person types.
const TYPING = "input:not([type=checkbox]):not([type=radio]), textarea, select, [contenteditable]";

function visible(element) {
  return element.checkVisibility() && !element.closest("[inert]");
}

function bound(key) {
  const scope = document.querySelector("dialog[open]") || document;
  return [...scope.querySelectorAll("[data-key]")].find((each) => each.dataset.key.split(" ").includes(key) && visible(each));
}

export function caption(element) {
  return (element.dataset.caption || element.getAttribute("aria-label") || element.textContent).replace(/\s+/g, " ").trim();
}

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing || event.repeat) return;
  if (event.target.closest?.(TYPING)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target.closest?.("button, a, summary")) return;
  const element = bound(event.key);
  if (!element) return;
  event.preventDefault();
  if (element.matches(TYPING)) element.focus();
  else element.click();
});

function showKeys() {
  const dialog = document.getElementById("keys");
  const seen = new Set();
  const rows = [];
  for (const element of document.querySelectorAll("[data-key]")) {
    if (!visible(element) || seen.has(element.dataset.key)) continue;
    seen.add(element.dataset.key);
    const row = document.createElement("tr");
    const keys = document.createElement("td");
    for (const each of element.dataset.key.split(" ")) {
      const key = document.createElement("kbd");
      key.textContent = each;
      keys.append(key, " ");
    }
    const meaning = document.createElement("td");
    const copy = element.cloneNode(true);
    copy.querySelectorAll?.("kbd").forEach((each) => each.remove());
    meaning.textContent = caption(copy);
    row.append(keys, meaning);
    rows.push(row);
  }
  dialog.querySelector("tbody").replaceChildren(...rows);
  dialog.showModal();
}

document.getElementById("show-keys")?.addEventListener("click", showKeys);
