// Messages: what did not work, and under "state" what has happened.
export function problem(text, place = "problems", className = "problem") {
  const line = Object.assign(document.createElement("p"), { className, textContent: text });
  document.getElementById(place).replaceChildren(line);
  return line;
}
