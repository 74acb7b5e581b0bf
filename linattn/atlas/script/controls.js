// Controls: each changes one thing, calls `react(value)` once when it is made and after every change, and works by keyboard.
import { element, named, words } from "./words.js";

// A slider. `show(value)` is what stands beside it: a string or { en, zh }.
export function slider(place, { name, label, min, max, step = 1, value = min, show = String }, react) {
  const input = element("input", { type: "range", min, max, step, value, "data-slider": name });
  const output = element("output", {});
  const update = () => {
    output.replaceChildren(...words(show(input.valueAsNumber)));
    react(input.valueAsNumber);
  };
  named(input, label);
  input.addEventListener("input", update);
  place.append(element("label", { class: "control" }, element("span", { class: "control-name" }, words(label)), input, output));
  update();
  return {
    get value() {
      return input.valueAsNumber;
    },
    set(next) {
      input.value = next;
      update();
    },
  };
}

// One of a few: `options` are [value, words] pairs.
export function choice(place, { name, label, options, value = options[0][0] }, react) {
  const group = element("fieldset", { class: "choice", "data-choice": name }, element("legend", {}, words(label)));
  const id = `${name}-${document.querySelectorAll("fieldset.choice").length}`;
  for (const [key, text] of options) {
    const input = element("input", { type: "radio", name: id, value: key });
    input.checked = key === value;
    input.addEventListener("change", () => react(key));
    group.append(element("label", {}, input, element("span", {}, words(text))));
  }
  place.append(group);
  react(value);
}

// One of many: a list that drops down. Texts are strings, since options hold no elements.
export function select(place, { name, label, options, value = options[0][0] }, react) {
  const input = element("select", { "data-select": name }, options.map(([key, text]) => element("option", { value: key }, text)));
  input.value = value;
  input.addEventListener("change", () => react(input.value));
  place.append(element("label", { class: "control" }, element("span", { class: "control-name" }, words(label)), input));
  react(input.value);
  return input;
}

export function button(place, { name, label }, react) {
  const node = element("button", { type: "button", "data-button": name }, words(label));
  node.addEventListener("click", react);
  place.append(node);
  return node;
}

// A row for controls.
export function controls(place) {
  const row = element("div", { class: "controls" });
  place.append(row);
  return row;
}
