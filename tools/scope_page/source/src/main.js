import { mount } from 'svelte';
import 'uplot/dist/uPlot.min.css';
import './page.css';
import App from './App.svelte';
import { archived, enter, loadArchive } from './lib/api.js';
import { takeControl, ui } from './lib/state.svelte.js';

// An exported page carries its data: nothing is asked of a server then.
if (archived()) await loadArchive();
else {
  try {
    const control = await enter();
    if (control) takeControl(control);
  } catch (error) { ui.message = { bad: true, text: error.message }; }
}
mount(App, { target: document.getElementById('page') });
