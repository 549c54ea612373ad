// The shell of `attnmix serve`: sends the typed text, shows its page in the frame, and lets Back lead to the one before.
const [form, field, state, frame] = ["ask", "text", "state", "page"].map((id) => document.getElementById(id));
const button = form.querySelector("button");
const texts = new Map(); // by the name of their page; the address and the browser's history hold names alone

function say(message, wrong = false) {
  state.textContent = message;
  state.classList.toggle("wrong", wrong);
}

function open(name) {
  frame.hidden = false;
  // The page says what was chosen on it: token by position, layer, head. The next text opens with the same.
  const choices = frame.contentDocument?.documentElement?.dataset.choices ?? "";
  // In place of the frame's own entry in the history, so that Back leads from text to text.
  frame.contentWindow.location.replace(`/page/${encodeURIComponent(name)}${choices && "#"}${choices}`);
  if (texts.has(name)) field.value = texts.get(name);
}

async function measure(text) {
  button.disabled = true;
  say("Measuring…");
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch("/measure", { method: "POST", headers, body: JSON.stringify({ text }) });
    if (!answer.ok) return say(await answer.text(), true);
    const { page, seconds } = await answer.json();
    texts.set(page, text);
    history.pushState(page, "", `#${page}`);
    open(page);
    say(`Measured in ${seconds.toFixed(1)} seconds.`);
  } catch {
    say("The server does not answer; start `attnmix serve` again.", true);
  } finally {
    button.disabled = false;
  }
}

function follow() {
  const name = location.hash.slice(1);
  say("");
  if (name) open(name);
  else frame.hidden = true;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  measure(field.value);
});
field.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!button.disabled) form.requestSubmit();
});
addEventListener("popstate", follow);

const about = await (await fetch("/about")).json();
document.getElementById("model").textContent = about.model + (about.both ? ", before and after fine-tuning" : "");
document.getElementById("examples").append(
  ...about.examples.map((text) => {
    const [item, chip] = ["li", "button"].map((name) => document.createElement(name));
    Object.assign(chip, { type: "button", textContent: text });
    chip.addEventListener("click", () => {
      field.value = text;
      if (!button.disabled) form.requestSubmit();
    });
    item.append(chip);
    return item;
  }),
);
follow();
field.focus();
