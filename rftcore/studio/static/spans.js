// Marked parts of a response: select tokens with the mouse or with the arrow keys (Shift extends), then press the key of a label.
let spans = [];
let begin = 0;
let end = 0; // the cursor: tokens begin to end, both included

const form = () => document.querySelector("#queue form[data-spans]");
const tokens = () => [...form().querySelectorAll("[data-token]")];

function redraw() {
  const all = tokens();
  for (const [i, token] of all.entries()) {
    const found = spans.find((each) => i >= each.start && i < each.end);
    token.classList.toggle("marked", Boolean(found));
    token.classList.toggle("cursor", i >= Math.min(begin, end) && i <= Math.max(begin, end));
  }
  form().querySelector("input[name=spans]").value = JSON.stringify(spans);
  const list = spans.map(({ start, end: after, label }, i) => {
    const marked = all.slice(start, after).map((each) => each.textContent).join("").slice(0, 60);
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: `${label}: ${marked} ×` });
    remove.dataset.remove = i;
    return remove;
  });
  form().querySelector(".marks").replaceChildren(...list);
}

function takeSelection() {
  const selection = getSelection();
  if (!selection.rangeCount || selection.isCollapsed) return;
  const chosen = tokens().flatMap((token, i) => (selection.containsNode(token, true) ? [i] : []));
  if (chosen.length) [begin, end] = [chosen[0], chosen.at(-1)];
  selection.removeAllRanges();
}

document.addEventListener("studio:item", () => {
  spans = [];
  begin = end = 0;
  if (form()) redraw();
});
document.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !form() || event.target.closest("input, textarea")) return;
  event.preventDefault();
  end = Math.max(0, Math.min(tokens().length - 1, end + step));
  if (!event.shiftKey) begin = end;
  redraw();
});
document.addEventListener("click", ({ target }) => {
  if (!form()?.contains(target)) return;
  if (target.dataset.token) begin = end = Number(target.dataset.token);
  if (target.dataset.remove) spans.splice(Number(target.dataset.remove), 1);
  const button = target.closest("[data-label]");
  if (button) {
    takeSelection();
    spans.push({ start: Math.min(begin, end), end: Math.max(begin, end) + 1, unit: "token", label: button.dataset.label });
  }
  if (!(target.dataset.token && !getSelection().isCollapsed)) redraw();
});
