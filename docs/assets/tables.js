// On the pages of results, a button under each table copies it as CSV. Without a clipboard it is downloaded. Nothing is fetched.
const tables = /\/results[^/]*$/.test(location.pathname) ? ".md-typeset table:not([class])" : "none";
for (const table of document.querySelectorAll(tables)) {
  const button = document.createElement("button");
  button.className = "copy-csv";
  button.textContent = "Copy as CSV";
  button.addEventListener("click", async () => {
    const cell = (one) => '"' + one.textContent.trim().replaceAll('"', '""') + '"';
    const csv = [...table.rows].map((row) => [...row.cells].map(cell).join(",") + "\n").join("");
    try {
      await navigator.clipboard.writeText(csv);
      button.textContent = "Copied";
    } catch {
      const link = document.createElement("a");
      link.href = "data:text/csv;charset=utf-8," + encodeURIComponent(csv);
      link.download = "table.csv";
      link.click();
      button.textContent = "Downloaded";
    }
    setTimeout(() => { button.textContent = "Copy as CSV"; }, 2000);
  });
  table.after(button);
}
