// Writes that survive a lost connection, a restarted studio and a reload: they wait in the tab's storage and are sent one after another.
// The server recognises a write that it has stored before, so sending one twice does no harm. What waits belongs to the buffer, the account and
// the author (identity) under which it was written: another account in the tab, or the studio of another buffer, neither sends nor sees it.
import { problem } from "./problems.js";

const IDENTITY = document.body.dataset.identity;
export const HEADERS = { "X-Studio-Token": document.body.dataset.token, "X-Studio-Identity": IDENTITY };
const STORE = `rft-studio-writes ${IDENTITY}`;
const RECEIPTS = `rft-studio-receipts ${IDENTITY}`;
export const MOST_UNDONE = 200; // answers that a page can undo
const AGAIN = new Set([401, 403, 408, 502, 503, 504]); // too slow, signed out, another account, a page older than the session, or no server
let waiting = JSON.parse(sessionStorage.getItem(STORE) || "[]");
let receipts = JSON.parse(sessionStorage.getItem(RECEIPTS) || "[]"); // [key, answer, url] of the newest stored writes
let isSending = false;
let pause = 1000;
const settled = new Map(); // key of a write -> what to call with (answer, problem)

function save() {
  sessionStorage.setItem(STORE, JSON.stringify(waiting));
  const state = document.getElementById("state");
  if (!waiting.length) state.querySelector("[data-unsent]")?.remove();
}

function tell(text) {
  const state = document.getElementById("state");
  const line = state.querySelector("[data-unsent]") || state.appendChild(document.createElement("p"));
  line.dataset.unsent = "";
  line.textContent = `${text} (${document.body.dataset.unsent}: ${waiting.length})`;
}

// Take back a write that has not been sent; false if it is on its way or stored.
export function takeBack(key) {
  const index = waiting.findIndex((each, i) => each.key === key && !(i === 0 && isSending));
  if (index < 0) return false;
  waiting.splice(index, 1);
  save();
  return true;
}

// Of each address the newest receipts are kept, as many as its page can undo (queue.js). A write that names a receipt has used it up.
function keepReceipt({ key, url, fields }, answer) {
  const used = new Set(Object.values(fields).map((value) => value?.of));
  receipts = receipts.filter(([each]) => !used.has(each));
  if (answer) receipts.push([key, answer, url]);
  const old = receipts.filter((each) => each[2] === url).slice(0, -MOST_UNDONE);
  receipts = receipts.filter((each) => !old.includes(each));
  sessionStorage.setItem(RECEIPTS, JSON.stringify(receipts));
}

export function write(url, fields, whenSettled) {
  const key = crypto.randomUUID();
  waiting.push({ key, url, fields });
  if (whenSettled) settled.set(key, whenSettled);
  save();
  send();
  return key;
}

// A field may be taken from the answer to an earlier write, which may itself still wait: {of: key, name: field}.
function resolved(value) {
  if (!value?.of) return value ?? "";
  return receipts.find(([key]) => key === value.of)?.[1]?.[value.name] ?? "";
}

async function attempt({ key, url, fields }) {
  const filled = Object.fromEntries(Object.entries(fields).map(([name, value]) => [name, resolved(value)]));
  const response = await fetch(url, {
    method: "POST",
    headers: { ...HEADERS, Accept: "application/json" },
    body: new URLSearchParams({ ...filled, key }),
  });
  const isJson = (response.headers.get("content-type") || "").includes("json");
  return { status: response.status, body: isJson ? await response.json() : { problem: await response.text() } };
}

export async function send() {
  if (isSending) return;
  isSending = true;
  try {
    while (waiting.length) {
      const current = waiting[0];
      const { status, body } = await attempt(current);
      if (AGAIN.has(status)) {
        tell(body.problem);
        throw new Error(String(status));
      }
      waiting.shift();
      keepReceipt(current, status < 400 ? body : null);
      save();
      pause = 1000;
      settled.get(current.key)?.(status < 400 ? body : null, status < 400 ? null : body);
      if (status >= 400 && !settled.has(current.key)) problem(body.problem);
      settled.delete(current.key);
    }
  } catch (error) {
    if (error instanceof TypeError) tell(document.body.dataset.offline);
    setTimeout(send, pause);
    pause = Math.min(2 * pause, 4000);
  } finally {
    isSending = false;
  }
}

addEventListener("online", send);
addEventListener("beforeunload", (event) => {
  if (waiting.length) event.preventDefault();
});
if (waiting.length) send();
