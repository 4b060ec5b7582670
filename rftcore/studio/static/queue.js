// A queue of items to judge (/review, /label/KIND, /compare). The next items are fetched ahead, so a key shows the next one at once while the
// answer is sent behind it. A button answers with the fields of data-answer (JSON), a form with data-answer-form with its own.
import { HEADERS, MOST_UNDONE, takeBack, write } from "./writes.js";
import { problem } from "./problems.js";

const place = document.getElementById("queue");
const AHEAD = 4;
const DONE = `rft-studio-done ${document.body.dataset.identity} ${place?.dataset.path}`;

const actions = document.getElementById("actions");
const ready = []; // items fetched ahead, in order
let current = null;
let cursor = ""; // place in the queue after the last fetched item
let isAtEnd = false;
let fetching = null;
let done = JSON.parse(sessionStorage.getItem(DONE) || "[]"); // answers of this tab, newest last
const undone = [];
const shown = new Map(); // item -> article, for the newest answers
const answered = new Set(done.filter((each) => each.answer).map((each) => each.fields.item));
let since = 0;
const isClaiming = place?.dataset.claims !== undefined; // questions are leased to this account
let renewed = Date.now(); // when leases were last extended
const skipped = new Set(); // questions that come again at the end

async function items(url, request) {
  const response = await fetch(url, request);
  if (!response.ok) throw new Error(await response.text());
  const template = document.createElement("template");
  template.innerHTML = await response.text();
  return [...template.content.querySelectorAll("article")];
}

// The next questions; those that this page holds are renewed.
async function claim(count) {
  const held = [current, ...ready].map((each) => each?.dataset.question).filter(Boolean);
  const body = new URLSearchParams({ count, run: place.dataset.run, holding: [...held, ...skipped].join(",") });
  const found = await items(`${place.dataset.path}/claim`, { method: "POST", headers: HEADERS, body });
  renewed = Date.now();
  return found;
}

// After a time without a connection the leases have ended, and what was fetched ahead may be with others.
function renew() {
  if (Date.now() - renewed < 290_000) return claim(0); // ms, a little less than a lease
  ready.length = 0;
  if (current) say(place.dataset.lapsed);
  return fetchAhead();
}

function fetchAhead() {
  fetching ??= (async () => {
    try {
      const query = new URLSearchParams({ count: AHEAD, cursor, run: place.dataset.run });
      const found = await (isClaiming ? claim(AHEAD) : items(`${place.dataset.path}/items?${query}`));
      if (found.length) cursor = found.at(-1).dataset.cursor;
      isAtEnd = found.length < AHEAD;
      const known = new Set([current, ...ready].map((each) => each?.dataset.itemId));
      ready.push(...found.filter((each) => !answered.has(each.dataset.itemId) && !known.has(each.dataset.itemId)));
    } finally {
      fetching = null;
    }
  })();
  return fetching;
}

function show(article) {
  current = article;
  place.replaceChildren(...(article ? [article] : []));
  document.getElementById("queue-empty").hidden = Boolean(article);
  actions.hidden = false;
  for (const each of actions.querySelectorAll("[data-answer], [data-answer-form] button, #skip")) each.disabled = !article;
  for (const form of actions.querySelectorAll("form")) form.reset();
  document.getElementById("reason").value = "";
  since = performance.now();
  if (article) {
    document.dispatchEvent(new CustomEvent("studio:item", { detail: article }));
    scrollTo({ top: 0 });
    article.focus({ preventScroll: true });
  }
}

async function next() {
  if (ready.length) {
    show(ready.shift());
    if (ready.length < 2 && !isAtEnd) fetchAhead().catch(() => {});
    return;
  }
  show(null);
  document.getElementById("queue-empty").hidden = true;
  try {
    while (!ready.length && !isAtEnd) await fetchAhead();
    if (!ready.length && cursor) {
      // The end: what was skipped comes again, and what became urgent meanwhile.
      cursor = "";
      skipped.clear();
      isAtEnd = false;
      while (!ready.length && !isAtEnd) await fetchAhead();
      if (ready.length && done.some((each) => !each.answer)) say(place.dataset.again);
    }
    if (!current) ready.length ? await next() : show(null);
  } catch {
    problem(document.body.dataset.offline);
    setTimeout(() => !current && next(), 2000);
  }
}

function say(text) {
  const line = problem(text, "state", "");
  setTimeout(() => line.remove(), 4000);
}

function remember() {
  done = done.slice(-MOST_UNDONE);
  sessionStorage.setItem(DONE, JSON.stringify(done));
  for (const id of [...shown.keys()].slice(0, -20)) shown.delete(id);
}

function submit(answer) {
  const article = current;
  if (!article) return;
  const { itemId: id, question, seen, version, shown: order } = article.dataset;
  const reason = document.getElementById("reason").value;
  const fields = { reason, ...answer, item: id, question, seen, version, shown: order, seconds: ((performance.now() - since) / 1000).toFixed(1) };
  const entry = { answer: { reason, ...answer }, fields };
  answered.add(id);
  shown.set(id, article);
  entry.key = write(`${place.dataset.path}/answer`, fields, (_, refusal) => {
    if (refusal) {
      answered.delete(id);
      done = done.filter((each) => each !== entry);
      problem(`${place.dataset.notStored}: ${refusal.problem}${refusal.todo ? `; ${refusal.todo}` : ""}`);
    }
    remember();
  });
  done.push(entry);
  undone.length = 0;
  remember();
  next();
}

async function undo() {
  const entry = done.pop();
  if (!entry) return say(place.dataset.nothingToUndo);
  const { item, question } = entry.fields;
  const back = async (article) => {
    answered.delete(item);
    if (current) ready.unshift(current);
    const held = isClaiming && !article ? await claim(AHEAD) : []; // it comes with its lease
    show(article || held.find((each) => each.dataset.itemId === item) || (await items(`${place.dataset.path}/item/${item}`))[0]);
    if (entry.answer) undone.push(entry);
    say(place.dataset.undone);
  };
  skipped.delete(question);
  remember();
  if (entry.key === undefined || takeBack(entry.key)) return back(shown.get(item));
  const fields = { item, question, label_batch_id: { of: entry.key, name: "label_batch_id" } };
  write(`${place.dataset.path}/${entry.answer ? "undo" : "unskip"}`, fields, (_, refusal) => {
    if (refusal) problem(`${place.dataset.notStored}: ${refusal.problem}`);
    else back(null).catch(() => problem(document.body.dataset.offline));
  });
}

function redo() {
  const entry = undone.at(-1);
  if (!entry || current?.dataset.itemId !== entry.fields.item) return;
  const rest = undone.slice(0, -1);
  submit(entry.answer);
  undone.push(...rest);
}

if (place) {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-answer]");
    if (button) submit(JSON.parse(button.dataset.answer));
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("[data-answer-form]")) return;
    event.preventDefault();
    document.activeElement.blur();
    submit(Object.fromEntries(new FormData(event.target, event.submitter)));
  });
  document.getElementById("skip").addEventListener("click", () => {
    const { itemId: item, question } = current.dataset;
    shown.set(item, current);
    if (question) skipped.add(question);
    done.push({ fields: { item, question }, key: question && write(`${place.dataset.path}/skip`, { question }) });
    remember();
    next();
  });
  document.getElementById("undo").addEventListener("click", undo);
  document.getElementById("redo").addEventListener("click", redo);
  document.addEventListener("studio:live", () => {
    if (current || fetching) return;
    cursor = "";
    isAtEnd = false;
    next();
  });
  if (isClaiming) setInterval(() => renew().catch(() => {}), 60_000);
  next();
}
