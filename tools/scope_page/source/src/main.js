import { mount } from 'svelte';
import 'uplot/dist/uPlot.min.css';
import './page.css';
import App from './App.svelte';
import { archived, loadArchive } from './lib/api.js';

// An exported page carries its data: nothing is asked of a server then.
if (archived()) await loadArchive();
mount(App, { target: document.getElementById('page') });
