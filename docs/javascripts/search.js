// A browser lets no page from a file read the index, so the search finds nothing there.
if (location.protocol === "file:") {
  const query = document.querySelector("[data-md-component=search-query]");
  query.placeholder = "Search needs a server: mkdocs serve";
  query.disabled = true;
}
