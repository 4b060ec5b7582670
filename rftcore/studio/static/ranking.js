// Rankings: answers named A, B, C … are chosen from the best to the worst; "=" ties the next one with the last. Enter sends the order.
let ties = []; // [["A"], ["B", "C"]]
let isTied = false;

function redraw(form) {
  const letters = [...form.querySelectorAll("[data-letter]")].map((each) => each.dataset.letter);
  const chosen = ties.flat();
  for (const button of form.querySelectorAll("[data-letter]")) {
    const rank = ties.findIndex((tie) => tie.includes(button.dataset.letter));
    button.setAttribute("aria-pressed", String(rank >= 0));
    button.querySelector(".rank").textContent = rank >= 0 ? `${rank + 1}.` : "";
  }
  form.querySelector(".order").textContent = ties.map((tie) => tie.join(" = ")).join("  >  ") + (isTied ? "  =" : "");
  const isComplete = chosen.length === letters.length || (letters.length === 2 && chosen.length === 1);
  // Of two answers, the one that is not chosen is the worse one.
  const order = letters.length === 2 && chosen.length === 1 ? [...ties, letters.filter((each) => each !== chosen[0])] : ties;
  form.querySelector("input[name=order]").value = isComplete ? JSON.stringify(order) : "";
  form.querySelector("button.main").disabled = !isComplete;
}

function choose(form, letter) {
  if (form.querySelectorAll("[data-letter]").length === 2) ties = [];
  if (ties.flat().includes(letter)) return;
  if (isTied && ties.length) ties.at(-1).push(letter);
  else ties.push([letter]);
  isTied = false;
  redraw(form);
}

document.addEventListener("studio:item", (event) => {
  ties = [];
  isTied = false;
  const form = event.detail.querySelector("[data-ranking]");
  if (form) redraw(form);
});

document.addEventListener("click", (event) => {
  const form = event.target.closest("[data-ranking]");
  const button = event.target.closest("button");
  if (!form || !button) return;
  if (button.dataset.letter) choose(form, button.dataset.letter);
  if (button.dataset.rank === "equal") ties = [[...form.querySelectorAll("[data-letter]")].map((each) => each.dataset.letter)];
  if (button.dataset.rank === "tie") isTied = ties.length > 0;
  if (button.dataset.rank === "again") ties = [];
  if (button.dataset.rank) redraw(form);
});
