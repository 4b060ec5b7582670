// Messages about what did not work.
export function problem(text) {
  const line = document.createElement("p");
  line.className = "problem";
  line.textContent = text;
  document.getElementById("problems").replaceChildren(line);
}
