"use strict";
// Sorts a table by the column of a button: the first time downwards, then up and down in turn.
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = Array.from(table.tHead.rows[0].cells);
  const value = (row, column) => row.cells[column].textContent;
  const order = (a, b, column) => {
    const [x, y] = [a, b].map((row) => parseFloat(value(row, column)));
    return Number.isNaN(x - y) ? value(b, column).localeCompare(value(a, column)) : y - x;
  };
  heads.forEach((head, column) => {
    head.firstElementChild.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      const sign = up ? -1 : 1;
      const body = table.tBodies[0];
      const rows = Array.from(body.rows).sort((a, b) => sign * order(a, b, column));
      body.append(...rows);
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
    });
  });
}
