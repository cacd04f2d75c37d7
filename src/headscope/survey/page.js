"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const places = new Map([...body.rows].map((row, place) => [row, place]));
  const headings = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.value;
  headings.forEach((heading, column) => {
    const button = heading.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const falls = heading.getAttribute("aria-sort") === "descending" || (!heading.hasAttribute("aria-sort") && heading.dataset.first === "rise");
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", falls ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => ({ row, place: places.get(row), text: value(row, column), number: Number(value(row, column)) }));
      const isNumeric = rows.every((each) => each.text === "" || !Number.isNaN(each.number));
      const order = (a, b) => (isNumeric ? a.number - b.number : a.text.localeCompare(b.text));
      rows.sort((a, b) => (a.text === "") - (b.text === "") || (falls ? order(a, b) : order(b, a)) || a.place - b.place);
      body.append(...rows.map((each) => each.row));
    });
  });
}
const search = document.getElementById("search");
if (search) {
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase();
    for (const row of document.querySelectorAll("table.sortable tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(words);
  });
}
