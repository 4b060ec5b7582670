// Forms that write: <form data-write="/path">. The write survives a lost connection (writes.js); then the page shows the new state.
import { problem } from "./problems.js";
import { write } from "./writes.js";

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (!form.dataset.write) return;
  event.preventDefault();
  const fields = Object.fromEntries(new FormData(form, event.submitter));
  const buttons = form.querySelectorAll("button");
  for (const each of buttons) each.disabled = true;
  write(form.dataset.write, fields, (_, refusal) => {
    for (const each of buttons) each.disabled = false;
    if (refusal) problem([refusal.problem, refusal.todo].filter(Boolean).join("; "));
    else if (form.dataset.then) location.assign(form.dataset.then);
    else location.reload();
  });
});
