// The shell of `attnmix serve`: sends typed texts, shows their page in the frame, and supports the Back button.
const ids = ["ask", "text", "other", "state", "page", "save"];
const [form, field, otherField, state, frame, save] = ids.map((id) => document.getElementById(id));
const button = form.querySelector("button");
const textsOf = new Map(); // texts by page name; the address and the browser's history contain only names

function say(message, wrong = false) {
  state.textContent = message;
  state.classList.toggle("wrong", wrong);
  frame.classList.toggle("earlier", wrong); // the page shows the previous texts instead of the typed ones
}

function open(name) {
  frame.hidden = false;
  // The page exposes its selection (token, layer, head), and the next page opens with the same selection. The token's
  // name is not in the address, because the address must not contain text.
  const shown = frame.contentDocument?.documentElement?.dataset;
  const choices = new URLSearchParams(shown?.choices ?? "");
  frame.dataset.word = shown?.word ?? "";
  const texts = textsOf.get(name) ?? [];
  Object.assign(save, { href: `/page/${encodeURIComponent(name)}`, hidden: false });
  if (texts.length > 1)
    for (const [choice, text] of [
      ["document", "0"],
      ["compare", "1"],
    ])
      choices.set(choice, text);
  // Replace the frame's history entry, so that Back navigates between texts.
  frame.contentWindow.location.replace(`/page/${encodeURIComponent(name)}${choices.size > 0 ? "#" : ""}${choices}`);
  // The opening example was not typed, so it is not filled in: otherwise, its second text would be compared with the
  // first typed text.
  if (texts.length > 0 && name !== about.opening.page) [field.value, otherField.value] = [texts[0], texts[1] ?? ""];
}

async function measure(texts) {
  button.disabled = true;
  say("Measuring…");
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch("/measure", { method: "POST", headers, body: JSON.stringify({ texts }) });
    if (!answer.ok) return say(await answer.text(), true);
    const { page, seconds } = await answer.json();
    textsOf.set(page, texts);
    history.pushState(page, "", `#${page}`);
    open(page);
    say(`Measured in ${seconds.toFixed(1)} seconds.`);
  } catch {
    say("The server does not answer; start `attnmix serve` again.", true);
  } finally {
    button.disabled = false;
  }
}

function openAddressed() {
  const name = location.hash.slice(1);
  say(name ? "" : "The page shows an example.");
  open(name || about.opening.page);
  return name;
}

function follow() {
  if (!openAddressed()) [field.value, otherField.value] = ["", ""];
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  measure(otherField.value.trim() ? [field.value, otherField.value] : [field.value]);
});
form.addEventListener("keydown", (event) => {
  const isTyped = event.target === field || event.target === otherField;
  if (!isTyped || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!button.disabled) form.requestSubmit();
});
addEventListener("popstate", follow);

const about = await (await fetch("/about")).json();
document.getElementById("model").textContent = about.model;
textsOf.set(about.opening.page, about.opening.texts);
[field.placeholder, otherField.placeholder] = about.opening.texts;
document.getElementById("examples").append(
  ...Object.entries(about.examples).map(([name, texts]) => {
    const [item, chip] = ["li", "button"].map((kind) => document.createElement(kind));
    Object.assign(chip, { type: "button", textContent: name, title: texts.join("\n") });
    chip.addEventListener("click", () => {
      [field.value, otherField.value] = texts;
      if (!button.disabled) form.requestSubmit();
    });
    item.append(chip);
    return item;
  }),
);
// A text that was typed while the page loaded is kept, and can only be measured from here on.
openAddressed();
button.disabled = false;
field.focus();
