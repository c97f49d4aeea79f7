(function () {
  "use strict";
  var table = document.querySelector(".trials");
  if (table) {
    var body = table.tBodies[0];
    var heads = Array.prototype.slice.call(table.tHead.rows[0].cells);
    var order = document.getElementById("order");
    var kind = document.getElementById("kind");
    var words = document.getElementById("words");
    var count = document.getElementById("count");
    var more = document.getElementById("more");
    var most = 50;

    var choose = function () {
      var wanted = words.value.toLowerCase();
      var fitting = 0;
      Array.prototype.forEach.call(body.rows, function (row) {
        var fits = (kind.value === "" || row.getAttribute("data-kind") === kind.value) &&
          row.textContent.toLowerCase().indexOf(wanted) >= 0;
        fitting += fits ? 1 : 0;
        row.hidden = !fits || fitting > most;
      });
      count.textContent = Math.min(fitting, most) + " of " + body.rows.length + " shown";
      more.hidden = fitting <= most;
    };
    more.addEventListener("click", function () { most = Infinity; choose(); });
    var sort = function (column, direction) {
      var rows = Array.prototype.slice.call(body.rows);
      var keyed = rows.map(function (row) {
        var cell = row.cells[column];
        var value = cell.getAttribute("data-value");
        return { row: row, key: value === null ? cell.textContent.trim() : Number(value) };
      });
      keyed.sort(function (a, b) {
        if (a.key === "" || b.key === "") { return (a.key === "") - (b.key === ""); }
        var least = typeof a.key === "number" && typeof b.key === "number"
          ? a.key - b.key : String(a.key).localeCompare(String(b.key));
        return direction * least;
      });
      keyed.forEach(function (entry) { body.appendChild(entry.row); });
      choose();
      heads.forEach(function (head, at) {
        if (at === column) { head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending"); }
        else { head.removeAttribute("aria-sort"); }
      });
      order.value = column + (direction > 0 ? "+" : "-");
    };
    heads.forEach(function (head, column) {
      head.querySelector("button").addEventListener("click", function () {
        sort(column, head.getAttribute("aria-sort") === "ascending" ? -1 : 1);
      });
    });
    order.addEventListener("change", function () {
      sort(parseInt(order.value, 10), order.value.slice(-1) === "-" ? -1 : 1);
    });

    kind.addEventListener("change", choose);
    words.addEventListener("input", choose);
    choose();
  }
})();
