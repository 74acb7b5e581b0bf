// Figures: a function draws each `<figure data-figure="name" data-set="id">` from the data set that Python put into the page.

const drawings = new Map();
const sets = new Map();

// `draw(place, data)` fills the element `place`; `data` is what Python's Page.data holds under the figure's data-set.
export function figure(name, draw) {
  drawings.set(name, draw);
}

export function dataset(id) {
  if (!sets.has(id)) {
    const node = document.getElementById(`data-${id}`);
    if (!node) throw new Error(`the page has no data set ${id}`);
    sets.set(id, JSON.parse(node.textContent));
  }
  return sets.get(id);
}

export function drawAll() {
  for (const node of document.querySelectorAll("figure[data-figure]")) {
    const draw = drawings.get(node.dataset.figure);
    if (!draw) throw new Error(`nothing draws figures ${node.dataset.figure}`);
    const place = document.createElement("div");
    place.className = "drawing";
    node.prepend(place);
    draw(place, dataset(node.dataset.set), node);
    node.dataset.ready = "";
  }
}
